"""Class rows in the devices of torch.distributed ranks."""
