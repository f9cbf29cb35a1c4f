"""The rows nearest to a vector: exact, or by an index of faiss."""
