"""What papers predict: LLMem's closed forms with its choice of a method, and DNNMem as LLMem rebuilds it."""
