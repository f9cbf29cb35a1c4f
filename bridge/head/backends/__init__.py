"""Backends for the rows of a head: pulled from a cluster, hosted by its shards, or on the training ranks."""
