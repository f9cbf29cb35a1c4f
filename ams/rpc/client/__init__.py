"""Client side of gRPC: carriers to a shard, the scheduler, a graph service and a slow gear, and the silence watch."""
