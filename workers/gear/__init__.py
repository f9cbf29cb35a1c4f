"""The slow-gear role: its request handler, and the objects it loads by name."""
