"""Modules whose weights lie in dense tables."""
