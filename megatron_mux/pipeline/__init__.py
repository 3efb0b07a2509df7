"""Time across stages: which action a stage computes when, what travels between stages, and pictures of both.

The room knows nothing of tasks: it runs callables for the actions of a template.
"""
