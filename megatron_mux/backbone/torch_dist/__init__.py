"""Megatron's distributed checkpoints (`torch_dist`): where they are, what they hold, and writing one."""
