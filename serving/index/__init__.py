"""Nearest-neighbor search over rows: exact, or with a faiss index."""
