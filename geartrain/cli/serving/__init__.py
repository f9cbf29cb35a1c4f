"""Commands for services of trained models that run."""
