"""Names of objectives and solvers, for flags: importing them imports no library."""

OBJECTIVES = ("vela", "full")
"""Names of the objectives, see `placement_cost`."""

SOLVERS = ("auto", "paper-lp", "eplb", "sequential", "random", "contiguous")
"""Names of the solvers; `auto` is ours."""
