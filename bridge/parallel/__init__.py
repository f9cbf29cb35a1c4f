"""Training on several ranks: what is replicated or split, what overlaps, which gradients travel, what it costs."""
