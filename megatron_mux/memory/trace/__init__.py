"""A training step traced with fake tensors on a GPU that is not there: what it allocates and frees.

What kernels allocate for themselves and free before they return is added from a table (`memory.invisible`). Not seen:
workspaces that cuBLAS keeps (`memory.insertion` adds them), the context, and NCCL's buffers.
"""
