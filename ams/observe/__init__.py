"""What tests and people see of a running process: failpoints, events, traces, and what is counted."""
