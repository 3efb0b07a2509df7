"""A GPU that is not there: fake tensors on `device="cuda"`, and a recorder of everything they allocate and free.

Scratch that kernels allocate for themselves is added (`memory.kernel_scratch`). Not seen: workspaces that cuBLAS keeps
(`stream.insertion` adds them), the CUDA context, and NCCL's buffers.
"""
