"""Samples as prefix trees: data that neighbours share is stored, read and computed once."""
