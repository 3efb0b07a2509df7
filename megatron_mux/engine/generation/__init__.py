"""Generates with several adapters at once: prompts of an evaluation, or completions that come and go."""
