"""Backbones and saved models: storage, prediction and evaluation."""
