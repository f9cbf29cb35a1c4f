"""Selection of the classes of a head's step, and the graphs of KNN softmax."""
