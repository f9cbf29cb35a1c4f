"""The server: a process that holds one or more shards."""
