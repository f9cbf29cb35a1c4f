"""Numpy programs that run on shards beside the rows: class head, its classes and their selection, pooling of bags."""
