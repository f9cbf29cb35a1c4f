"""Layers whose rows are split over ranks, and the softmax over their outputs."""
