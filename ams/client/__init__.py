"""Client of a cluster: tables, their reads and writes, snapshots and data streams."""
