"""What a step of parallel training costs before it runs: memory, collectives and time on given hardware."""
