"""Conversations with several adapters side by side on one backbone: `megatron-mux chat`."""
