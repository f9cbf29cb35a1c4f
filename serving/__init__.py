"""Inference of trained models over HTTP and gRPC, without torch."""
