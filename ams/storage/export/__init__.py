"""The versions of tables that an export has written, for those who follow it."""
