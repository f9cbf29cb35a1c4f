"""Numpy programs that run beside rows: the class head, its classes and their selection."""
