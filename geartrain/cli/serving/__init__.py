"""Commands for running model services."""
