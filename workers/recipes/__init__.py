"""Recipes and data of image trainings: the rendered glyphs of the quickstart, and a person's own images."""
