"""Building of the exact table of nearest neighbours of class rows."""
