"""Small state under string keys, in memory, LMDB or Redis."""
