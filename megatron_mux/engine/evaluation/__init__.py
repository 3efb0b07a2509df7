"""Held-out figures of tasks, computed together: losses, ranked completions, metrics of generated texts."""
