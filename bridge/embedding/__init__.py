"""Embedding tables as modules: ids of sparse features in, pooled or sequence vectors out."""
