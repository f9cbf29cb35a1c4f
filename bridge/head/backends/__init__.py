"""Where the rows of a head are worked on: one room for each place."""
