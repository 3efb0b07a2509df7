"""Training steps of `transformers` and `peft` traced on a fake GPU: what they allocate and free, at any depth."""
