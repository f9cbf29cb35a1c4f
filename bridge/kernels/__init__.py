"""What GPUs compute in one pass: a kernel, and in tensor operations the reference that it equals, for each function."""
