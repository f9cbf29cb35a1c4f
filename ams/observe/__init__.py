"""What tests and people see of a running process: failpoints, events, and what is counted."""
