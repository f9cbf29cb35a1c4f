"""What every module with rows shares: its pending updates, their optimizer, and its saved state."""
