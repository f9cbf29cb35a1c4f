"""Placement of trained rows: in a cluster (pulled or hosted), or on the devices of the ranks."""
