"""Freezes of a shard's tables for snapshots, and restores from them."""
