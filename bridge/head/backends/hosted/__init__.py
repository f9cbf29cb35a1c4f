"""Class rows that stay on the shards, to which features are sent."""
