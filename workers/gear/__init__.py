"""The slow-gear role's work: the partitions it holds, and what it takes over from gears that are gone."""
