"""The scheduler: membership, placement and schemas of a cluster."""
