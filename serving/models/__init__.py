"""Kinds of models that can be served, one a file."""
