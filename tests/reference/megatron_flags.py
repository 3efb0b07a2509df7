"""Names of the flags of Megatron-LM's training scripts (Megatron-Core 0.16.1 and 0.19.2)."""

from __future__ import annotations

from pathlib import Path

MEGATRON_FLAGS = frozenset(f"--{name}" for name in Path(__file__).with_suffix(".txt").read_text().split())
"""Every flag of Megatron-LM's parser, in both versions."""
