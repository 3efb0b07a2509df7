"""Pipeline schedules: which action each stage runs when, what stages send each other, and pictures of both.

This package knows nothing of tasks: it calls a callback for each action of a template.
"""
