"""Collectives of a job's ranks over torch.distributed (gloo, NCCL), and losses and means over them."""
