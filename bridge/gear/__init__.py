"""Gear training: a slow gear as a module, its feature cache and its gradients batched by id."""
