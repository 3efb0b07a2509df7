"""PyTorch's caching allocator for CUDA, replayed without a device."""
