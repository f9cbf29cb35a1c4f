"""Rules by which rows of a table go when nobody needs them."""
