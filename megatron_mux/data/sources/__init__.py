"""Kinds of data files, one module each: rows in order, and a row again by its place."""
