"""Samples with sparse features: read from files and topics in batches, each exactly once for any number of workers."""
