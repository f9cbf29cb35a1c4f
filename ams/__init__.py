"""The advanced model server: rows, shards, the scheduler and the client that talks to them.

Arrays and bytes only: numpy (bfloat16 through ml_dtypes), never torch.
"""
