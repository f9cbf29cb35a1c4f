"""How a program asks a graph service, in this process or another."""
