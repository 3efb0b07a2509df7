"""Logits and losses of labelled rows."""
