"""Pulls, pushes and assigns of rows, each one call of compiled code to all shards."""
