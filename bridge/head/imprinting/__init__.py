"""Class centers made of the mean features of their images."""
