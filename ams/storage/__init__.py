"""What survives a process: snapshots, key-value state and stored features."""
