"""Stages of a model on ranks of their own: senders of features, and owners of the split layer."""
