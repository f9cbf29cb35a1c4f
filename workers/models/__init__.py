"""Backbones and saved models: how they are kept, used for prediction, and judged."""
