"""A recorder of what a step does on a GPU: the host is real, the device is not there."""
