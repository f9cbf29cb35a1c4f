"""A slow gear behind gRPC."""
