"""Samples with sparse features: read from files and topics in batches, each exactly once however many workers read."""
