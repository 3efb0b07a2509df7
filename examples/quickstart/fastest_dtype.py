"""Print the faster dtype for the quickstart on this machine: bf16 if its matrix products are clearly faster, else fp32.

Processors with bfloat16 instructions and GPUs train the quickstart about twice as fast in bfloat16, to similar losses.
Other processors emulate it, slower than fp32. A measurement of one second on one thread decides.
"""

from __future__ import annotations

import time

import torch

MIN_SPEEDUP = 1.3  # of matrix products; with less, the rest of a step would outweigh the gain


def seconds(dtype: torch.dtype, device: str, rounds: int = 9) -> float:
    """Return the median time of four matrix products of the size of the quickstart's backbone."""
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
    """Measure and print the dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    ratio = seconds(torch.float32, device) / seconds(torch.bfloat16, device)
    print("bf16" if ratio > MIN_SPEEDUP else "fp32")


if __name__ == "__main__":
    main()
