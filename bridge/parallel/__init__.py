"""Training on several ranks: replicated and split parts, overlap, sparsified gradients and cost plans."""
