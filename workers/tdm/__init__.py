"""Training of a tree of items, which finds items a user will like without scoring every item."""
