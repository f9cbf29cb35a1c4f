"""Commands that start a cluster or one role, and that query or change a running cluster."""
