"""Training of a tree of items that finds what a user will like without scoring every item."""
