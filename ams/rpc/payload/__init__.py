"""How rows travel: in the message, through memory that both sides share, or over a connection of their own."""
