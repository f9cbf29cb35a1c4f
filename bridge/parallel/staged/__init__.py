"""Stages of a model on ranks of their own: each computes on the output of the stage before."""
