"""How requests travel: in the same process (local) or over gRPC. One contract suite tests every carrier."""
