"""Cost of a step of parallel training before it runs: memory, collectives and time on given hardware."""
