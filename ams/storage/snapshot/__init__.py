"""Snapshots on a disk or in an object store: blocks, manifests, chains."""
