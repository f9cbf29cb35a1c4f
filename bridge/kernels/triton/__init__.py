"""The kernels themselves, imported only where they run."""
