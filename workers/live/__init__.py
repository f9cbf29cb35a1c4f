"""What a training gives to servers that follow it: its network without parameters, and versions of it."""
