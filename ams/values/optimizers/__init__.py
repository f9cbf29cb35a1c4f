"""How a push changes rows: an optimizer is what it is made from and its plain reference, in a file each."""
