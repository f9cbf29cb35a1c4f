"""How requests travel: carriers over gRPC or in one process, all held to one contract suite."""
