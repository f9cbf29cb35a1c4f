"""Durable storage: snapshots, key-value state and stored features."""
