"""Layers whose rows lie on several ranks, and the softmax over what they give."""
