"""Sparsified gradients: the largest few of every gradient, exactly, and what stays behind for later steps."""
