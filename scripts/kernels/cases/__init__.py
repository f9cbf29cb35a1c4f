"""Which kernels are compiled, for which types and sizes: a file for each file of kernels, with a list ``CASES``."""
