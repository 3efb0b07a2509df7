"""What must not change when packages move: runs and commands that two commits are compared by."""
