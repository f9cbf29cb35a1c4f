"""Scheduler role: members, tables, bucket map and stream readers of the cluster."""
