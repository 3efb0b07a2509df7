"""Starts and stops the processes of instances, and says when they have ended; nothing else."""
