"""What hiding messages of tensor ranks gives at scale, simulated from the roofline of an H100: nothing is measured.

python benchmarks/interleaving.py --output benchmarks/results/interleaving-simulated-h100.json   # half a minute

One pipeline stage of Llama-3-8B in bf16, equal LoRA tasks (r=16 on q and v, 8 sequences of 128 tokens in a step). All
sides are simulated by `fusion/graphs/launch_order.py` on costs of the planner's roofline, at two bandwidths of the
link.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.backbone.registry import BackboneInfo
    from megatron_mux.fusion.planner.stage_cost import StageCosts
    from megatron_mux.fusion.profiler.profile import Profile

SIZES = (2, 4, 8)
"""Tensor ranks, and tasks."""
LINKS = {"NVLink, 300 GB/s": 300e9, "network, 50 GB/s": 50e9}
SEQUENCES, TOKENS = 8, 128
SIDES = ("batched", "in turns, Algorithm 1", "in turns, ours", "batched, in halves")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone-shape", default="llama3-8b", help="a shape of workload.py (llama3-8b)")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and publish."""
    arguments = parse(argv)
    rows = [
        _simulated(arguments.backbone_shape, link, tensor, tasks)
        for link in LINKS
        for tensor in SIZES
        for tasks in SIZES
    ]
    result = {"backbone": arguments.backbone_shape, "rows": rows}
    publish(result, markdown(result), arguments.output)
    return 0


def _simulated(shape: str, link: str, tensor: int, tasks: int) -> dict[str, Any]:
    """Seconds of a step of equal tasks on one stage, and over one task after another."""
    from megatron_mux.fusion.graphs.launch_order import Interleave

    info = info_of(shape)
    costs = equal_tasks(info, h100(info, tensor, LINKS[link]), tensor, tasks)

    def of(sets: Sequence[tuple[int, ...]], interleave: Interleave, parts: int = 1) -> float:
        assert costs.interleaving is not None
        overlap = dataclasses.replace(costs.interleaving, interleave=interleave)
        hybrids = costs.hybrids(sets, parts) * parts
        return sum(overlap.seconds([h.pass_cost(0, way) for h in hybrids], 0) for way in (False, True))

    every, alone = tuple(range(tasks)), [(i,) for i in range(tasks)]
    serial = sum(of([own], "off") for own in alone)
    found = {
        "batched": of([every], "off"),
        "in turns, Algorithm 1": of(alone, "kahn"),
        "in turns, ours": of(alone, "auto"),
        "batched, in halves": of([every], "auto", parts=2),
    }
    return {
        "link": link,
        "tensor": tensor,
        "tasks": tasks,
        "share_of_messages": share_of_messages(costs),
        "seconds": {"one after another": serial, **found},
        "speedup": {name: serial / own for name, own in found.items()},
    }


def info_of(shape: str) -> BackboneInfo:
    """A backbone of a shape of `workload.SHAPES`."""
    from workload import SHAPES

    from megatron_mux.backbone.registry import info_without_weights

    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    with tempfile.TemporaryDirectory() as directory:
        config = {**fields, "hidden_act": "silu", "rms_norm_eps": 1e-5, **SHAPES[shape]}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return info_without_weights(directory)


def h100(info: BackboneInfo, tensor: int, bandwidth: float) -> Profile:
    """The roofline of an H100 in bf16, its tensor ranks joined by a link of so many bytes a second."""
    from megatron_mux.fusion.profiler.roofline import roofline

    profile = roofline(info.shape, {"device": "H100", "kind": "cuda", "threads": 1}, 2, tensor)
    curve = profile.curves["all_reduce"]
    # The roofline's all-reduce is a latency and bytes over its own link: here over this one.
    latency = 2 * curve.forward[0] - curve.forward[1] if curve.sizes[1] == 2 * curve.sizes[0] else 0.0
    moved = [2 * info.shape.hidden * 2 * (tensor - 1) / tensor * size for size in curve.sizes]
    return with_messages(profile, [latency + count / bandwidth for count in moved])


def with_messages(profile: Profile, seconds: Sequence[float]) -> Profile:
    """A profile whose all-reduces, of the sizes that it has, take these seconds."""
    curve = dataclasses.replace(profile.curves["all_reduce"], forward=tuple(seconds), backward=tuple(seconds))
    return dataclasses.replace(profile, curves={**profile.curves, "all_reduce": curve})


def equal_tasks(
    info: BackboneInfo,
    profile: Profile,
    tensor: int,
    tasks: int,
    stages: int = 1,
    sequences: int = SEQUENCES,
    tokens: int = TOKENS,
) -> StageCosts:
    """Costs of equal LoRA tasks, each with so many sequences of so many tokens in a step, on equal stages."""
    import numpy as np
    from engine_bench import spec_of

    from megatron_mux.fusion.planner.load import TaskLoad
    from megatron_mux.fusion.planner.stage_cost import StageCosts
    from megatron_mux.memory.forms.method import ParallelConfig

    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    lengths = np.full(sequences, tokens, np.int32)
    load = TaskLoad.of(spec_of("task", adapter, sequences, tokens), lengths, lengths // 2, info.shape)
    loads = [dataclasses.replace(load, name=f"task-{i}") for i in range(tasks)]
    each = info.shape.layers // stages
    layers = [range(s * each, (s + 1) * each) for s in range(stages)]
    itemsize = 2 if profile.about["kind"] == "cuda" else 4
    return StageCosts(profile, info.shape, loads, layers, ParallelConfig(tensor=tensor), itemsize, "auto")


def share_of_messages(costs: StageCosts) -> float:
    """Of the seconds of one task's step by itself."""
    one = costs.hybrid((0,), 1)
    return (sum(one.communication_forward) + sum(one.communication_backward)) / sum(one.alone())


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    headings = "link | TP | tasks | messages of one task's step | " + " | ".join(SIDES)
    rows = [
        [
            row["link"],
            row["tensor"],
            row["tasks"],
            f"{row['share_of_messages']:.0%}",
            *(f"{row['speedup'][name]:.2f}x" for name in SIDES),
        ]
        for row in result["rows"]
    ]
    about = (
        f"**{result['backbone']}**, one stage in bf16, simulated from an H100's roofline, not measured: equal LoRA "
        f"tasks (r=16 on q and v), {SEQUENCES} sequences of {TOKENS} tokens each. Speed-up over one task after another."
    )
    paper = (
        "MuxTune reports 1.19x for a layer of four interleaved tasks at TP=4 (Figure 18: GPUs are used 84.7% of the "
        "time before, 97.8% after) and 1.20x to 1.23x for two to eight tasks (Figure 19a)."
    )
    return "\n".join([about, "", *table(headings, rows), "", paper])


if __name__ == "__main__":
    sys.exit(main())
