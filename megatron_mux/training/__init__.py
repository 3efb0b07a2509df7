"""A run of the engine: the loop around its steps, and the tasks that join, wait and leave."""
