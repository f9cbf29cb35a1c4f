"""Snapshots of a whole cluster and versions of its tables: written, restored and followed."""
