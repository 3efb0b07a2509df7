"""A step as allocations and frees in order; its extension to any depth, and the insertion of further blocks."""
