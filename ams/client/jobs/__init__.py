"""What the workers of one job tell each other by the scheduler: where they are, and how far."""
