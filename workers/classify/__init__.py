"""Classifiers of images: the training of a backbone and a class head, its looks at a validation, and its report."""
