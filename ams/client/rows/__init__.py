"""Rows pulled, pushed and assigned by one call of compiled code to all shards."""
