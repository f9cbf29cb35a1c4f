"""Commands about this machine: health checks, settings, and benchmarks."""
