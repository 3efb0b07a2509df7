"""Conversations with several adapters side by side on one backbone: `tools/chat.py`."""
