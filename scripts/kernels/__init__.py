"""Kernels compiled for GPUs that are not here, and what a step must cost on one."""
