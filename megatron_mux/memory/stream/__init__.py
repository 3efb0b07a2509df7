"""A step as allocations and frees, in order: what it is, of any depth, with blocks put in."""
