"""The server role: a shard that runs one request at a time, a write exactly once, and holds moments for snapshots."""
