"""A simulated GPU: fake tensors on `device="cuda"`, and a recorder of everything they allocate and free.

Scratch that kernels allocate for themselves is added (`memory.kernel_scratch`). Not recorded: workspaces that cuBLAS
keeps (`stream.insertion` adds them), the CUDA context, and NCCL's buffers.
"""
