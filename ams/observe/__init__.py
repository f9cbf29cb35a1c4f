"""What tests and people see of a running process: failpoints, and what is counted."""
