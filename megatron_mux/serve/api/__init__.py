"""OpenAI's API: files, uploads, fine-tuning jobs and models, for unmodified clients."""
