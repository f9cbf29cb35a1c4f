"""Observation of a running process: metrics, events, traces and failpoints."""
