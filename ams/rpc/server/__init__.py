"""gRPC servers: methods bound to handlers, access, health, and calls that wait without a thread."""
