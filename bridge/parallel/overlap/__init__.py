"""Overlap of communication and computation: a step over micro-batches, and traces that measure the overlap."""
