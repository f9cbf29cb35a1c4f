"""Communication that goes on while a rank computes: a step over micro-batches, and what a trace tells of it."""
