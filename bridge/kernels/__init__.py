"""Triton kernels, each with a reference in tensor operations that gives the same result."""
