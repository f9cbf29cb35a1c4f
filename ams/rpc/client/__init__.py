"""The ways to a shard, the scheduler, a graph service and a slow gear over gRPC, and what tells a caller of silence."""
