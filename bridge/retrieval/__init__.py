"""Retrieval of the best of very many items without scoring each: a tree whose nodes a click model scores."""
