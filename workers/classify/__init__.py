"""Classifiers of images: the training of a backbone and a class head, its validations and its report."""
