"""Common parts of modules with rows: pending updates, their optimizer, and saved state."""
