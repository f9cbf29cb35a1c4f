"""Client of a graph service, in this process or another."""
