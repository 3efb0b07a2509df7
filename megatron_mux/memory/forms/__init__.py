"""Our closed forms: what each rank holds, for any division of any model, full fine-tuning or adapters."""
