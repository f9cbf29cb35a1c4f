"""The maths of a class head: margins, softmax, and row gradients (``chunk_pass.py``), which then wait for a step."""
