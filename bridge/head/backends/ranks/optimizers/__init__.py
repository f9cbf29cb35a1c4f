"""The optimizers of rows on ranks in tensor operations, on any device, in the dtype of the operands: a file each."""
