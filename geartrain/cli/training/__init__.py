"""Commands that train a model, use one that was trained, and say what one would take."""
