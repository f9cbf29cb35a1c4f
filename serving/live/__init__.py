"""Models that follow a running training: each of its snapshots becomes the next version."""
