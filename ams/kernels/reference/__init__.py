"""Plain references, each the specification of a kernel; that of the class pass is in ``test_class_pass.py``."""
