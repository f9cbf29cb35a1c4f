"""Recipes that train: the rendered glyphs of the quickstart, and a person's own images."""
