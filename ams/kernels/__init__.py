"""The C++ kernels by subject, behind typed functions."""
