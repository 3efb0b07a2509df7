"""Training steps of `transformers` and `peft`, traced on a fake GPU, at any depth."""
