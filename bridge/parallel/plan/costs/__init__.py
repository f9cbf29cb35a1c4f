"""What parts of a step cost, each by itself: operations, collectives, replicas, class heads."""
