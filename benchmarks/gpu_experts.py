"""A layer of routed experts on a GPU: whether it is right, whether the host waits, and how long it takes.

    python benchmarks/gpu_experts.py [--device cuda|cpu] [--seconds 60] [--output FILE]

One JSON object a line, as they come; `--output` has them all.

- `right`: the largest relative error (Frobenius norm) of outputs, input gradients and gradients of adapters on experts
  against products in fp64 on the host, for experts and tasks with and without rows, while one task's rows are not
  numbers; and whether those rows change a bit of another task's.
- `waits`: whether a forward and a backward pass of a layer, router included, run with
  `torch.cuda.set_sync_debug_mode("error")`.
- `time`: milliseconds of a layer of Qwen3-30B-A3B's shape without its router, by each way of computing products and
  adapters (LoRA of rank 16 of four tasks on all experts; `none`: without adapters); `floor_ms` is what its frozen
  products take at the rate of an 8192^3 product in the same process.

`--device cpu` runs all of it with small sizes: a test of the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.expert_op import AttachedExperts
from megatron_mux.adapters.host import Host, no_weights
from megatron_mux.attributes import replaced
from megatron_mux.backbone import columns
from megatron_mux.backbone.experts.exchange import Received
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.registry import read_shape
from megatron_mux.base_ops import EXPERT_OPS, BaseOpInfo
from megatron_mux.batch.micro_batch import MicroBatch, activate
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.expert_shape import Placement
from megatron_mux.kernels.experts import product as grouped_product
from megatron_mux.kernels.pointwise.reference import gated
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-30B-A3B's shape, one layer."""
SMALL = {
    **CONFIG,
    "hidden_size": 192,
    "moe_intermediate_size": 80,
    "num_experts": 10,
    "num_experts_per_tok": 3,
}
"""Of the comparisons."""
RANKS = (3, 16, 40, 8)
"""Of the tasks of the comparisons; the last one has no rows."""


class Case(NamedTuple):
    """A layer, the adapters on it, and rows.

    Attributes:
        layer: The experts.
        adapters: Of all tasks.
        batch: The rows of the tasks.
        x: `[N, H]` them.
        experts: `[N, K]` int64.
        weights: `[N, K]`.
    """

    layer: MoELayer
    adapters: AdapterSet
    batch: MicroBatch
    x: Tensor
    experts: Tensor
    weights: Tensor

    def compute(self, x: Tensor) -> Tensor:
        """The layer without its router: `[N, H]`."""
        with activate(self.batch):
            received = Received(x, self.weights, self.experts, self.batch_slots, self.experts.numel())
            return self.layer.compute(received)

    @property
    def batch_slots(self) -> Tensor:
        """`[N]` int64, the slot of each row's task."""
        with activate(self.batch):
            return self.layer.slots(len(self.x))

    @property
    def parameters(self) -> list[Tensor]:
        """What tasks train."""
        return [p.value for adapter in self.adapters.tasks.values() for p in adapter.parameters]


def make(
    config: dict[str, Any],
    parallel: Parallel,
    dtype: torch.dtype,
    ranks: Sequence[int],
    lengths: Sequence[int],
) -> Case:
    """A layer with random weights and a LoRA of each rank; tasks without rows have length 0."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        shape = read_shape(directory)
    assert shape.experts is not None
    torch.manual_seed(0)
    activation = gated("silu")
    assert activation is not None
    placement = Placement.contiguous(shape.experts.count, 1, (0,))
    with torch.device(parallel.device):
        layer = MoELayer(shape, 0, placement, parallel, activation, None)
    for parameter in layer.parameters():
        values = torch.empty_like(parameter).normal_(0, parameter.shape[-1] ** -0.5)
        parameter.data, parameter.requires_grad = values.to(dtype), False
    infos = [
        BaseOpInfo(
            0, op, getattr(layer, op), columns.inputs(shape, op, 0, 1), columns.parts(shape, op, 0, 1),
            shape.names.layer.format(0),
        )
        for op in EXPERT_OPS
    ]  # fmt: skip
    adapters = AdapterSet(Host(infos, parallel, dtype, shape, weights=no_weights))
    for task, rank in enumerate(ranks):
        adapter = {
            "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }  # fmt: skip
        spec = {
            "name": f"task-{task}",
            "adapter": adapter,
            "data": {"path": "rows"},
            "training": {"max_steps": 9},
        }
        made = adapters.add(TaskSpec.model_validate(spec), 9)
        for own in made.parameters:
            own.value.data.normal_(0, own.value.shape[-1] ** -0.5)
        made.flat_params.refresh()
    adapters.prepare()
    names = tuple(f"task-{task}" for task in range(len(lengths)))
    sequences = [
        PackedSequence(name, task, torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), 1.0)
        for task, (name, n) in enumerate(zip(names, lengths, strict=True))
        if n
    ]
    batch = pack(sequences, names, dict.fromkeys(names, 0)).to(parallel.device)
    rows, count, top_k = sum(lengths), shape.experts.count, shape.experts.routing.top_k
    # The last experts get no rows.
    scores = torch.rand(rows, max(top_k, count - count // 5), device=parallel.device)
    weights, experts = scores.softmax(dim=-1).topk(top_k, dim=-1)
    x = torch.randn(rows, shape.hidden, device=parallel.device).to(dtype)
    return Case(layer, adapters, batch, x, experts, weights.to(dtype))


def passes(case: Case, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, input gradient and gradients of parameters."""
    for parameter in case.parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    x = x.clone().requires_grad_()
    y = case.compute(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, [p.grad.clone() for p in case.parameters if p.grad is not None]


def reference(case: Case, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same in fp64 on the host, expert by expert and task by task; rows that are not numbers are left out."""
    wide = [
        [
            tensor.detach().double().cpu().requires_grad_()
            for tensor in map(adapter.flat_params.copy_of, adapter.parameters)
        ]
        for adapter in case.adapters.tasks.values()
    ]
    matrices = [own.matrices.double().cpu() for own in (case.layer.experts_fc1, case.layer.experts_fc2)]
    slots, experts, weights = case.batch_slots.cpu(), case.experts.cpu(), case.weights.double().cpu()
    x = x.double().cpu().requires_grad_()
    y = torch.zeros_like(x)
    scales = [adapter.spec.lora_alpha / adapter.spec.r for adapter in case.adapters.tasks.values()]
    for slot, own in enumerate(wide):
        for expert in range(len(matrices[0])):
            row, choice = ((experts == expert) & (slots == slot).unsqueeze(1)).nonzero(as_tuple=True)
            hidden = x[row]
            for place, matrix in enumerate(matrices):
                down, up = own[2 * place : 2 * place + 2]
                rank = down.shape[0] // len(matrix)
                a, b = (
                    down.view(-1, rank, down.shape[1])[expert],
                    up.view(up.shape[0], rank, -1)[:, :, expert],
                )
                hidden = hidden @ matrix[expert].t() + scales[slot] * (hidden @ a.t() @ b.t())
                if place == 0:
                    gate, inner = hidden.chunk(2, dim=-1)
                    hidden = torch.nn.functional.silu(gate) * inner
            y = y.index_add(0, row, hidden * weights[row, choice].unsqueeze(1))
    y.backward(dy.double().cpu())
    assert x.grad is not None
    gradients = [own.grad if own.grad is not None else torch.zeros_like(own) for of in wide for own in of]
    return y.detach(), x.grad, gradients


def right(parallel: Parallel, dtype: torch.dtype, product: str) -> dict[str, Any]:
    """Compare with the reference, with rows of one task that are not numbers beside the others."""
    case = make(SMALL, parallel, dtype, RANKS, (70, 5, 190, 0))
    dy = torch.randn_like(case.x)
    clean = passes(case, case.x, dy)
    wanted = reference(case, case.x, dy)
    spoilt_x, spoilt_dy, others = case.x.clone(), dy.clone(), torch.ones(len(dy), dtype=torch.bool)
    others[70:75] = False  # those of the second task
    spoilt_x[70:75], spoilt_dy[70:75] = float("nan"), float("inf")
    beside = passes(case, spoilt_x, spoilt_dy)
    keep = [place for place in range(len(clean[2])) if place // 4 != 1]
    mine = others.to(dy.device)
    return {
        "output": _error(clean[0], wanted[0]),
        "input gradient": _error(clean[1], wanted[1]),
        "adapters' gradients": max(map(_error, clean[2], wanted[2])),
        "a task without rows has no gradient": all(not own.any() for own in clean[2][12:]),
        "not a number beside it changes no bit": torch.equal(clean[0][mine], beside[0][mine])
        and torch.equal(clean[1][mine], beside[1][mine])
        and all(torch.equal(clean[2][place], beside[2][place]) for place in keep),
        "products": product,
        "dtype": str(dtype),
    }


def _error(found: Tensor, wanted: Tensor) -> float:
    if not wanted.any():
        return 0.0 if not found.any() else float("inf")
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def waits(parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    """Run a whole layer where a wait of the host is an error."""
    case = make(SMALL, parallel, dtype, RANKS, (70, 5, 190, 0))
    x = case.x.unsqueeze(1).requires_grad_()
    outcome = "none"

    def run() -> None:
        with activate(case.batch):
            y, _ = case.layer(x)
        y.backward(torch.ones_like(y))

    run()  # loads kernels
    if parallel.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        outcome = str(error).partition("\n")[0]
    finally:
        if parallel.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"dtype": str(dtype), "waits": outcome}


@contextmanager
def computed_by(case: Case, product: str, adapters: str) -> Iterator[None]:
    """Inside, products and adapters are computed so."""
    for op in case.adapters.ops:
        assert isinstance(op, AttachedExperts)
        op.kernels = "loop" if adapters == "loop" else None
    with replaced(grouped_product, "product_for", lambda x, weight: product):
        yield


def milliseconds(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The median of several calls, after two."""
    found = []
    for turn in range(times + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn > 1:
            found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def timed(case: Case, with_adapters: str, product: str, rate: float) -> dict[str, Any]:
    """Time of a layer's forward pass, and of both."""
    x, dy = case.x.clone().requires_grad_(), torch.randn_like(case.x)
    device = case.x.device

    def both() -> None:
        case.compute(x).backward(dy)

    with computed_by(case, product, with_adapters):
        forward, whole = (milliseconds(run, device) for run in (lambda: case.compute(x), both))
    layer, pairs = case.layer, case.experts.numel()
    flops = (
        2 * pairs * sum(own.in_features * own.out_features for own in (layer.experts_fc1, layer.experts_fc2))
    )
    return {
        "rows": len(case.x),
        "products": product,
        "adapters": with_adapters,
        "forward_ms": round(forward, 3),
        "both_ms": round(whole, 3),
        "floor_ms": round(2e3 * flops / rate, 3),
    }


def product_rate(parallel: Parallel, size: int) -> float:
    """FLOP/s of a large product in bf16."""
    a = torch.randn(size, size, device=parallel.device, dtype=torch.bfloat16)
    return 2e3 * size**3 / milliseconds(lambda: a @ a, parallel.device)


def cases(parallel: Parallel) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """All measurements, what matters most first."""
    on_gpu = parallel.device.type == "cuda"
    ways = ("grouped_mm", "triton") if on_gpu else ("loop",)
    for dtype in (torch.float32, torch.bfloat16):
        yield "right", partial(right, parallel, dtype, "the default's")
        yield "waits", partial(waits, parallel, dtype)
    if on_gpu:
        yield "right", partial(_right_by, parallel, "triton")
    rate = product_rate(parallel, 8192 if on_gpu else 64)
    yield "rate", partial(dict, tflops=round(rate / 1e12, 1))
    config = CONFIG if on_gpu else SMALL
    for rows in (4096, 16384) if on_gpu else (64,):
        plain = make(config, parallel, torch.bfloat16, (), [rows])
        adapted = make(config, parallel, torch.bfloat16, (16,) * 4, [rows // 4] * 4)
        for product in ways:
            yield "time", partial(timed, plain, "none", product, rate)
            yield "time", partial(timed, adapted, "triton", product, rate)
        yield "time", partial(timed, plain, "none", "loop", rate)
        yield "time", partial(timed, adapted, "loop", "loop", rate)


def _right_by(parallel: Parallel, product: str) -> dict[str, Any]:
    with replaced(grouped_product, "product_for", lambda x, weight: product):
        return right(parallel, torch.bfloat16, product)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60, help="begin nothing later than this")
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    args = parser.parse_args(argv)
    parallel = runtime.initialize(device=args.device)
    began, found = time.monotonic(), []
    try:
        for name, run in cases(parallel):
            if time.monotonic() - began > args.seconds:
                break
            try:
                own = {"what": name, **run()}
            except Exception as error:  # the others are worth having
                own = {"what": name, "failed": f"{type(error).__name__}: {error}"[:2000]}
            found.append(own | {"at_s": round(time.monotonic() - began, 1)})
            print(json.dumps(found[-1]), flush=True)
            if args.output is not None:
                args.output.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
