"""Norms and optimizer steps of many tasks at once."""
