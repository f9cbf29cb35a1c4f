"""Server role: shards that run one request at a time, apply each write exactly once, and are saved in snapshots."""
