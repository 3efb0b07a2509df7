"""Sizes of optimizer states in 8 bits, for estimates that do not load torch."""

BLOCK = 256
"""Number of values that share a scale."""
SMALL = 4096
"""Tensors with fewer values keep their moments in fp32."""
