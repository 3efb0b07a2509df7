"""One mapping file for each family of Hugging Face checkpoints."""
