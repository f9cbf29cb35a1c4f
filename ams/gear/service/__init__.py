"""A slow gear behind gRPC, and the partitions of ids that it holds."""
