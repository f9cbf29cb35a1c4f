"""Which classes take part in a step of a head, and the graphs that KNN softmax selects from."""
