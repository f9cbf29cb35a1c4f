"""Which ids of a table get a row."""
