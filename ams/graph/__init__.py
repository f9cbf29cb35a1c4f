"""Graphs of nearest neighbours among the classes, from which a KNN softmax selects its active classes."""
