"""Training of models that predict clicks from sparse features."""
