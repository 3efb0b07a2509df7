"""Matrices of frozen weights held in 4 or 8 bits, and dequantised for use."""
