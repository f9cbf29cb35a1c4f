"""Pulls, pushes and assigns of rows, by one call of compiled code to all shards."""
