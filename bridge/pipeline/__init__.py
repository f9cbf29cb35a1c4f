"""Input pipeline: batches are read, and their rows pulled, while earlier steps are computed."""
