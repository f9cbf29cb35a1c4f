"""Torch modules on AMS tables: tensors and autograd, never sockets."""
