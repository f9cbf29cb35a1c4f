"""Data that only examples and benches use."""
