"""Admission: rules by which ids of a table get a row."""
