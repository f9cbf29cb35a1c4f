"""Live page of a running cluster, and the polls that feed it."""
