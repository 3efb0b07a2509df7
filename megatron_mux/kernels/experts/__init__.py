"""Products of routed experts, and the low-rank terms of all tasks on them."""
