"""Peak memory of training, predicted without a GPU: closed forms, traces, the allocator, and what fits."""
