"""A gRPC port: methods bound to handlers, health, and calls that wait without a thread."""
