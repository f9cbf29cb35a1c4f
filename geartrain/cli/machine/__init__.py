"""Commands about this machine: its fitness, its settings, and how fast Geartrain is on it."""
