"""Imprinting: class centers from the mean features of their images."""
