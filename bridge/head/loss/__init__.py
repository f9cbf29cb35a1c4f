"""Mathematics of a class head: margins, softmax, and row gradients (``chunk_pass.py``)."""
