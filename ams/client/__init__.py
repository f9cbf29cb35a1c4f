"""What a program holds of a cluster: tables, their reads and writes, snapshots and data streams."""
