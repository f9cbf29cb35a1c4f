"""Row optimizers: the settings of each, in a file each."""
