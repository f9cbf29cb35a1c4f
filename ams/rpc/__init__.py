"""Transport of requests: carriers over gRPC or in one process, all tested by one contract suite."""
