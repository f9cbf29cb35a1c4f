"""Expiry: rules by which unused rows of a table are removed."""
