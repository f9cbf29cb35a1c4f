"""Top-k gradient sparsification with error feedback: ranks exchange the largest entries, and keep the rest locally."""
