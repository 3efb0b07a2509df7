"""Sweeps: which configurations stop early, which go on, and which is the best one. Nothing here trains."""
