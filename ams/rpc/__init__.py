"""How requests travel: carriers over gRPC or in one process. One contract suite tests every carrier."""
