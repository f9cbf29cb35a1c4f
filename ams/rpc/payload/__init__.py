"""How rows travel: in the message, or by the data plane: through memory that both sides share, or by TCP."""
