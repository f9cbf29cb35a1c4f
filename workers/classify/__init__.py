"""Image classifiers: training of a backbone and a class head, validations and report."""
