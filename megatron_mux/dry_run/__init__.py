"""Dry runs: the engine's own step on a fake GPU, as any rank of any parallel layout, from a config.json alone.

The engine runs unchanged in a process of its own, with fake tensors and a fake process group. What it would allocate
and free is recorded as a `memory.stream.events.Stream`.
"""
