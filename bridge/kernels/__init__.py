"""Triton kernels, each with a reference in tensor operations that computes the same."""
