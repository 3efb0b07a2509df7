"""The backbone: a frozen Megatron-Core model built and filled from a Hugging Face directory."""
