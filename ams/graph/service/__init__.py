"""The graph service: builds, keeps and hands out the graphs of a cluster's class tables."""
