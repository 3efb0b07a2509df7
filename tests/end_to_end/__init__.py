"""The whole of it against the oracle, through the public interfaces."""
