"""A training step traced with fake tensors on a GPU that is not there: what it allocates and frees.

Not seen, and to be added: what kernels allocate for themselves and free before they return (the backward pass of
flash attention, the sort in an embedding's gradient, partial sums of norms' gradients, the blocks of a foreach norm),
workspaces of cuBLAS and cuDNN, the context, and NCCL's buffers.
"""
