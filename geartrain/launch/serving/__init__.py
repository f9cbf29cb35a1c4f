"""The role that serves trained models, in one process or several."""
