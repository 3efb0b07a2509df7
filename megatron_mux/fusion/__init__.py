"""Many tasks as one: which tasks share a micro-batch, in which order micro-batches run, and how sequences are aligned.

Its product is a plan (`plan.py`): data that is the same on every rank, printable, and checked before anything
runs. `profiler/` tells what a backbone takes on a device, `planner/` makes plans from that, `graphs/` orders what one
bucket interleaves; `step.py` says what a plan computes in a step.
"""
