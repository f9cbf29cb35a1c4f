"""Records of bytes by id that may be forgotten, in memory, LMDB or Redis."""
