"""One training job: the loop, its state and snapshots, and its recovery."""
