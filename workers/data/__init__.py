"""Readers of training data: images, faces, archives and streams."""
