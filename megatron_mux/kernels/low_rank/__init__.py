"""A frozen product with the low-rank terms of all tasks."""
