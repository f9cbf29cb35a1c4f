"""Samples in Kafka topics: messages, partitions as data streams, offsets as their cursors."""
