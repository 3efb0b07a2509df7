"""Print the dtype in which the quickstart trains fastest here: bf16 if it multiplies matrices clearly faster, or fp32.

Processors with bfloat16 instructions and GPUs train the quickstart about twice as fast in bfloat16, to like losses.
Others would emulate it, slower than fp32. A second's measurement on one thread tells them apart.
"""

from __future__ import annotations

import time

import torch

ENOUGH = 1.3  # times as fast: less would be lost in everything that is no matrix product


def seconds(dtype: torch.dtype, device: str, rounds: int = 9) -> float:
    """The median time of a product as large as those of the quickstart's backbone."""
    x = torch.randn(512, 576, dtype=dtype, device=device)
    weight = torch.randn(576, 1536, dtype=dtype, device=device)
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        for _ in range(4):
            y = x @ weight
        float(y[0, 0])  # waits for a GPU
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[rounds // 2]


def main() -> None:
    """Measure and print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    ratio = seconds(torch.float32, device) / seconds(torch.bfloat16, device)
    print("bf16" if ratio > ENOUGH else "fp32")


if __name__ == "__main__":
    main()
