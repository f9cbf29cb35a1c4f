"""Graph service: builds, stores and serves the graphs of a cluster's class tables."""
