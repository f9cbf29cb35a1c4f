"""Roles that are also clients of their cluster."""
