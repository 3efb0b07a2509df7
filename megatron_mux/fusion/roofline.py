"""Estimates a profile from the device's roofline: its peak arithmetic and its memory bandwidth.

An operator takes the longer of its arithmetic at the device's peak and its traffic at the device's bandwidth (on a CPU
their sum), and a fixed overhead. That is good enough to compare layouts; the seconds themselves may be far off, and a
plan made from them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_mux.adapters.costs import Place, Work
from megatron_mux.adapters.registry import KINDS
from megatron_mux.base_ops import BASE_OPS, BaseOpName
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.fusion.profile import Curve, Profile, grid_up_to

_MESSAGE_SHARE = {"cpu": 0.2, "cuda": 0.06}
"""`Profile.message_share`: on a CPU about what gloo's thread was seen to take; on a GPU 8 CTAs of an H100's 132
multiprocessors."""


def roofline(
    shape: Any, about: Mapping[str, Any], itemsize: int, tensor_parallel: int = 1, most_tokens: int = 16384
) -> Profile:
    """The estimated profile.

    Args:
        shape: The backbone's sizes.
        about: What `about_run` says: the device, and whatever else names the run.
        itemsize: Bytes of the backbone's dtype.
        tensor_parallel: Ranks that share each layer.
        most_tokens: Rows of the last point of the curves.
    """
    device = device_of(about["kind"], about["device"], about["threads"])
    sizes = grid_up_to(most_tokens)

    def curve(work: Callable[[float], tuple[float, float]], backward: float = 1.0) -> Curve:
        """`work` gives FLOP and bytes; the backward takes `backward` times as long."""
        seconds = []
        for size in sizes:
            flops, traffic = work(size)
            seconds.append(device.seconds(flops, traffic, itemsize))
        return Curve(tuple(sizes), tuple(seconds), tuple(backward * s for s in seconds))

    def product(k: float, n: float) -> Curve:
        return curve(lambda rows: (2 * rows * k * n, itemsize * (rows * (k + n) + k * n)))

    def passes(width: float) -> Curve:
        """Reading and writing rows of so many elements."""
        return curve(lambda rows: (rows * width, itemsize * rows * width))

    tp, h = tensor_parallel, shape.hidden
    inner = shape.out_features("linear_fc1") / tp
    more_norms = 2 * h * shape.output_norms
    head_norms = 2 * (shape.heads + shape.kv_heads) * shape.head_dim / tp * shape.qk_norm
    curves: dict[str, Curve] = {
        **{str(op): product(*_widths(shape, op, tp)) for op in BASE_OPS},
        "norm": passes(2 * h),
        "rotary": passes(2 * (shape.heads + shape.kv_heads) * shape.head_dim / tp if any(shape.ropes) else 0),
        "activation": passes(inner + shape.ffn / tp),
        "glue_attention": passes(3 * h + more_norms + head_norms),
        "glue_mlp": passes(3 * h + more_norms),
        "entry": passes(2 * h),
        "head": curve(_head(h, shape.vocab / tp, itemsize), backward=0.0),
        **_attention(shape, device, itemsize, tp),
        **_adapters(shape, tp, curve, itemsize),
        "transfer": _link(sizes, device, h * itemsize),
    }
    if tp > 1:
        curves["all_reduce"] = _link(sizes, device, 2 * h * itemsize * (tp - 1) / tp)
    return Profile(
        source="roofline",
        about={**about, "device": device.name},
        curves=curves,
        message_share=_MESSAGE_SHARE[about["kind"]] if tp > 1 else 0.0,
        attention_in_one_call=about["kind"] == "cuda",
        tensor_seconds=2 * device.overhead,
        element_seconds=28 / device.bandwidth,
        sequence_seconds=5e-5,
        step_seconds=10 * device.overhead,
    )


def _head(hidden: int, vocab: float, itemsize: int) -> Callable[[float], tuple[float, float]]:
    """FLOP and bytes of labels' losses, forward and gradient at once: 4 V H a label."""
    return lambda labels: (4 * labels * hidden * vocab, itemsize * 2 * (hidden + labels) * vocab)


def _widths(shape: Any, op: BaseOpName, tensor_parallel: int) -> tuple[float, float]:
    """Input and output width of a BaseOp on a rank."""
    rows = tensor_parallel if op in ("linear_proj", "linear_fc2") else 1
    return shape.in_features(op) / rows, shape.out_features(op) / (tensor_parallel / rows)


def _link(sizes: list[int], device: Device, bytes_per_row: float) -> Curve:
    seconds = tuple(device.latency + size * bytes_per_row / device.link for size in sizes)
    return Curve(tuple(sizes), seconds, seconds)


def _attention(shape: Any, device: Device, itemsize: int, tp: int) -> dict[str, Curve]:
    """Scores and values, twice that backward."""
    found: dict[str, Curve] = {}
    for length in grid_up_to(8192, least=8):
        for past in (0, 256, 1024, 4096):
            pairs = length * (length + 1) / 2 + length * past
            flops = 4 * pairs * shape.heads * shape.head_dim / tp
            keys = 2 * (length + past) * shape.kv_heads + 2 * length * shape.heads
            traffic = itemsize * keys * shape.head_dim / tp
            seconds = (
                device.seconds(2 * flops, traffic, itemsize),
                device.seconds(16 * flops, 8 * traffic, itemsize),
            )
            found[f"attention:{length}:{past}"] = Curve((1, 8), seconds, tuple(2 * s for s in seconds))
    return found


def _adapters(shape: Any, tp: int, curve: Callable[..., Curve], itemsize: int) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for sample in (sample for kind in KINDS.values() for sample in kind.samples()):
        for op in sample.ops:
            section = sample.section(op, ["module"])
            work, place = section.work(Place(op, *_widths(shape, op, tp))), section.curve(1)
            assert place is not None, "samples take seconds"

            def rows(rows: float, work: Work = work) -> tuple[float, float]:
                return rows * work.flops, itemsize * (rows * work.moved + work.weights)

            found[f"{place.name}:{op}:{place.size}"] = curve(rows, backward=2.0)
            found[f"utilisation:{place.name}"] = Curve((1,), (1.0,), (1.0,))
    return found
