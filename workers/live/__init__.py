"""Output of a training for servers that follow it: its network without parameters, and versions of it."""
