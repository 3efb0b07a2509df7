"""Optimizers over flat parameters: one file each, with its states, their bytes, its update and what a save holds."""
