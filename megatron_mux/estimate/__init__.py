"""Predicts what a run takes: the engine runs on fake tensors at a few sizes, and tables of `footprint` are solved."""
