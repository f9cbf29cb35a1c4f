"""Class rows that travel to this process, held or streamed."""
