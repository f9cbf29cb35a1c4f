"""What fast gears and slow gears say to each other, and which gear answers for which ids."""
