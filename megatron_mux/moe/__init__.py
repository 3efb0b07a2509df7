"""Mixture of experts: which experts tasks use, and on which workers experts are placed (VELA)."""
