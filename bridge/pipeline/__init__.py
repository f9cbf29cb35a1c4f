"""What comes before a training step, done while earlier steps are computed."""
