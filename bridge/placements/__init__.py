"""Where trained rows lie: pulled from a cluster, hosted by its shards, or on the devices of the ranks."""
