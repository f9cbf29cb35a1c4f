"""Training programs: jobs, models, data and recipes."""
