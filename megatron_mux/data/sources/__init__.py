"""Kinds of data files, one module each: rows in order."""
