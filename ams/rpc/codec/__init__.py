"""Encoding of values: protobuf headers, and raw arrays beside them."""
