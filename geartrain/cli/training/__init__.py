"""Commands that train a model, use a trained one, and estimate the memory and time of a training."""
