"""Models that follow a training still running: each of its snapshots is the next version."""
