"""What the ranks of a job say to each other over torch.distributed (gloo, NCCL)."""
