"""Would FP8 products change losses? A GPU's products of FP8 with FP8, emulated on a CPU.

    python benchmarks/fp8_products.py --output benchmarks/results/fp8-products-cpu-2-cores.json

A LoRA task trains on the quickstart's short movie reviews (run `make quickstart` first), on its backbone with FP8
weights in fp32: once with the inputs of frozen products as they are, once rounded to e4m3 with a scale for each row,
as such products take them. Gradients go through the rounding unchanged. Both runs take the same batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from script import add_machine, add_output, command_line, measured_on, publish, table

if TYPE_CHECKING:
    from torch import Tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice, and compare."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    parser.add_argument("--batch", type=int, default=4, help="reviews of a step (4)")
    add_machine(parser, device=False)
    add_output(parser)
    arguments = parser.parse_args(argv)
    import torch
    import torch.nn.functional as F
    from engine_bench import environment
    from quantised_accuracy import reviews, trained

    from megatron_mux.runtime import initialize, shutdown

    torch.set_num_threads(arguments.threads)
    parallel, linear = initialize(device="cpu"), F.linear
    examples, _ = reviews(arguments.steps * arguments.batch, 1)
    asked = {"batch": arguments.batch, "steps": arguments.steps, "seeds": 1}

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x + (rounded(x.detach()) - x.detach()), weight, bias)

    # The engine's frozen products are its only calls of this function; the output layer's is another one.
    backbone, _, exact = trained("fp8", parallel, examples, asked, None)
    with mock.patch.object(F, "linear", rounding):
        _, _, other = trained("fp8", parallel, examples, asked, None)
    losses = {"exact": [one["seed-0"] for one in exact], "rounded": [one["seed-0"] for one in other]}
    result = {**environment(backbone, arguments.threads), **asked, **losses}
    publish(result, markdown(result), arguments.output)
    shutdown()
    return 0


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    pairs = list(zip(result["exact"], result["rounded"], strict=True))
    off = [abs(rounded - exact) / exact for exact, rounded in pairs]
    rows = [
        (step + 1, f"{exact:.4f}", f"{rounded:.4f}", f"{own:.1e}")
        for step, ((exact, rounded), own) in enumerate(zip(pairs, off, strict=True))
    ]
    told = (
        f"Losses with FP8 weights, inputs of frozen products as they are and rounded to e4m3 by rows: at most "
        f"{max(off):.1e} apart, relative."
    )
    head = measured_on("SmolLM2-135M", "float32", result["hardware"], result["versions"])
    lines = table("step | inputs as they are | inputs rounded | relative difference", rows)
    return "\n".join([head, "", told, "", *lines])


def rounded(x: Tensor) -> Tensor:
    """`[T, K]` in e4m3, with a scale for each row."""
    import torch

    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


if __name__ == "__main__":
    raise SystemExit(main())
