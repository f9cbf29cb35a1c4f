"""Where the class rows of a job are: in a cluster, or on the devices of its ranks."""
