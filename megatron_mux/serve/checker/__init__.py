"""Checks requests and files with the engine's own code, in warm processes beside the server."""
