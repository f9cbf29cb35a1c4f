"""Sparsified gradients: the largest few entries of every gradient, exactly; the rest is kept for later steps."""
