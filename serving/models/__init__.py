"""What can be loaded and asked, one kind of model a file."""
