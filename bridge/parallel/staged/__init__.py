"""Stages of a model on ranks of their own: each works on what the stage before gives."""
