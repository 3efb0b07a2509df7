"""Which parallel method to train with: what fits where, how fast it would be, and the flags that run it."""
