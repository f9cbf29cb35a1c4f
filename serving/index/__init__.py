"""Nearest-neighbor search over rows: exact, or by an index of faiss."""
