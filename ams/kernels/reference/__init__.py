"""Plain references: each is the specification of a kernel."""
