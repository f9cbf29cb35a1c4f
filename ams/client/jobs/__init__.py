"""Coordination of a job's workers through the scheduler: their rendezvous and their steps."""
