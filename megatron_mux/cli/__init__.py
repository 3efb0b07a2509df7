"""The commands of `megatron-mux`: one file each, listed in `main`. Files of `tools/` call the same functions."""
