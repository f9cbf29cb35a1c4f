"""Messages between fast gears and slow gears, and the partitions of ids that each slow gear serves."""
