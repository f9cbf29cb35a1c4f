"""Optimizers for large batches, and a schedule that enlarges the batch instead of lowering the learning rate."""
