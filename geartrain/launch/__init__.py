"""Start of whole clusters, single roles and their processes, and checks of a machine."""
