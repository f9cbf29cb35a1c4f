"""gRPC service: KServe's inference protocol v2."""
