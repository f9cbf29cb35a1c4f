"""Roles that are clients of their cluster, too."""
