"""Margins: changes of the logit of a sample's own class, or of the others, before the softmax."""
