"""Typed functions of the C++ kernels, by subject."""
