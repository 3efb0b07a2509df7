"""What users do with an adapter after training: merge it into its backbone, combine several, export one for llama.cpp.

Everything works on files: no model is built, and of a backbone no more than one weight is in memory.
"""
