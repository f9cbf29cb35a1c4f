"""The class head: the last layer and loss of a classifier whose class centers are rows of a table."""
