"""Split fine-tuning: private data on clients, the body of the model on a server (Menos)."""
