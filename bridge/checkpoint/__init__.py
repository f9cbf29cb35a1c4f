"""Models on disk as one thing: modules together with the rows that they train."""
