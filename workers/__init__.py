"""The programs that train: jobs, models, data and recipes."""
