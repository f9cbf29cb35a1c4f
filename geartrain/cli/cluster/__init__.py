"""Commands that start a cluster or one of its roles, and that ask or change a cluster that runs."""
