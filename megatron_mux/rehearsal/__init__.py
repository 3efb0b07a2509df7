"""Rehearsals: our own engine's step without memory, on any rank of any division, from a config.json alone.

The engine itself runs, in a process of its own: on a device that is not there, in a world of ranks that are not there.
What it would allocate and free is recorded as a `memory.stream.events.Stream`.
"""
