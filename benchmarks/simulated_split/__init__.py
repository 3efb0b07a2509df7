"""Simulates a split server with thousands of clients."""
