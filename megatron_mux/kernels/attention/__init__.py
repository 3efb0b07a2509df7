"""Attention over the segments of a micro-batch."""
