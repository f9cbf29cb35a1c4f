"""The gRPC service: the inference protocol v2 of KServe."""
