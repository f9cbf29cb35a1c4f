"""Communication that goes on while a rank computes: a step over micro-batches, and traces that measure the overlap."""
