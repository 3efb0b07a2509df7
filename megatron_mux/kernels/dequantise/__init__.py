"""Whole matrices out of their quantised form."""
