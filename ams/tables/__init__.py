"""The rows that one shard owns of a table, and their slots."""
