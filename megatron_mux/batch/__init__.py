"""Micro-batches: sequences of several tasks, packed end to end on the host, and their named arrays on the device."""
