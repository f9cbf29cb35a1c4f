"""Tables of nearest neighbours among the classes: what a KNN softmax chooses its active classes from."""
