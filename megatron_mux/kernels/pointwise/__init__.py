"""Element-wise operations between frozen products."""
