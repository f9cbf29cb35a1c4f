"""The server role: a shard that runs one request at a time, exactly once, and holds moments for snapshots."""
