"""The scheduler role: who is in the cluster, which tables there are, who owns which bucket, who reads which stream."""
