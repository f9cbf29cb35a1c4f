"""Networks over the vectors of embedding fields that predict clicks."""
