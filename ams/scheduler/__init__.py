"""The scheduler role: who is in the cluster, which tables there are, who reads which data stream."""
