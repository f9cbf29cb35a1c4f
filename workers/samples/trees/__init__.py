"""Samples as prefix trees: what neighbours share is stored, read and computed once."""
