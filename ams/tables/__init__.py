"""Tables on one shard: rows, their slots, admission and expiry."""
