"""The work of the slow-gear role: what it answers, and what it is told by name."""
