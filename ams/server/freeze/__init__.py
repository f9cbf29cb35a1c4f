"""Tables of a shard held for a snapshot, and tables given their rows back from one."""
