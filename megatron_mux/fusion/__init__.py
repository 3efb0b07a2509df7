"""Many tasks as one: which tasks share a micro-batch, in which order micro-batches run, and how sequences are aligned.

Floor 4. Its product is a plan (`plan.py`): data that is the same on every rank, printable, and checked before anything
runs. So far plans come from the fixed policies `serial`, `temporal` and `spatial`. This room will hold the planner of
MuxTune (sections 3.3 to 3.5): the cost of a hybrid task from a profile, the dynamic programme that groups tasks into
hybrid tasks, the balance of buckets over pipeline clocks, the alignment of data by chunks, and the interleaving of
subgraphs of several tasks.
"""
