"""Closed forms of the memory of each rank, for any division of any model, full fine-tuning or adapters."""
