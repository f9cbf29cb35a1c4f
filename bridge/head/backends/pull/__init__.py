"""Class rows that are pulled to this process, held or streamed."""
