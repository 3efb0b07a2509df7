"""Solvers of the placement problem: baselines, the paper's linear program, and ours."""
