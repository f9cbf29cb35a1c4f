"""What survives a process: snapshots on a local disk."""
