"""However the backbone is split, a task's adapter comes out the same: TP x PP x DP over 4 processes, fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Backbone, Recompute, load_stages
from megatron_mux.backbone.split import Split
from megatron_mux.backbone.stage_pass import Pieces
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning
from megatron_mux.fusion.graphs.launch_order import LaunchOrder, PieceCost, encode, kahn
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.families import FAMILIES, loha
from tests.end_to_end.harness import Case, assert_close, random_records


class Layout(NamedTuple):
    """How four processes are divided: the rest is data parallel."""

    tensor: int
    pipeline: int
    sequence_parallel: bool = False
    split: Split = ()


LAYOUTS = [
    Layout(1, 1),
    Layout(2, 1),
    Layout(2, 1, True),
    Layout(1, 2),
    Layout(1, 2, split=(3, 1)),
    Layout(1, 2, split=(1, 1, 1, 1)),
    Layout(2, 2),
    Layout(2, 2, True, split=(1, 3)),
    Layout(2, 2, True, split=(1, 1, 1, 1)),
    Layout(1, 4),
]
# Pairwise, together with the pairs of `test_gradients.py` and those below: each policy on flat, divided and virtual
# stages, each layout with several policies. And each family where its columns or stages are divided otherwise.
PAIRS: dict[tuple[str, str], list[Layout]] = {
    ("llama", "spatial"): [LAYOUTS[i] for i in (1, 5, 7, 9)],
    ("llama", "auto"): [LAYOUTS[4]],
    ("llama", "side by side"): [LAYOUTS[6]],
    ("llama", "gpipe"): [LAYOUTS[9]],
    ("llama", "interleaved"): [LAYOUTS[8]],
    ("gpt2", "spatial"): [LAYOUTS[i] for i in (2, 8)],
    ("gemma3_text", "chunks"): [LAYOUTS[i] for i in (2, 8)],
    ("phi3-longrope", "chunks"): [LAYOUTS[i] for i in (2, 9)],
    ("llama-one-kv-head", "spatial"): [LAYOUTS[i] for i in (2, 8)],
}
STEPS = 3
PLAIN = ("spatial", "temporal")

Results = list[dict[str, tuple[float, float, int]]]
Tensors = dict[str, dict[str, Tensor] | None]


def cases_of(family: str, vocab: int) -> list[Case]:
    targets = FAMILIES[family.partition("-")[0]]
    qv = targets.query_value

    def case(name: str, adapter: dict[str, object], records: int, longest: int, **training: object) -> Case:
        training = {
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "max_steps": 8,
            "seed": 3,
            **training,
        }
        return Case(name, adapter, training, random_records(records, vocab, 3, longest, seed=len(name)))

    return [
        case(
            "lora",
            {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": qv},
            9,
            16,
            label_smoothing_factor=0.1,
            neftune_noise_alpha=5.0,
        ),
        case(
            "everywhere",
            {"peft_type": "LORA", "r": 3, "lora_dropout": 0.1, "target_modules": "all-linear"},
            8,
            9,
            gradient_accumulation_steps=2,
            max_grad_norm=0.01,
            optim="adafactor",
            loraplus_lr_ratio=4.0,
        ),
        case(
            "bottle",
            {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": targets.outputs},
            5,
            12,
        ),
        case(
            "scales",
            {"peft_type": "IA3", "target_modules": targets.ia3, "feedforward_modules": targets.feedforward},
            6,
            12,
        ),
        case("prefix", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5}, 3, 10),
        case("pruned", {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": qv}, 6, 8),
        case(
            "dora",
            {
                "peft_type": "LORA",
                "r": 3,
                "use_dora": True,
                "lora_dropout": 0.1,
                "rank_pattern": {targets.mixed[0]: 5},
                "target_modules": targets.mixed,
            },
            5,
            9,
        ),
        case("principal", {"peft_type": "LORA", "init_lora_weights": "pissa", "target_modules": qv}, 4, 8),
        case(
            "vera", {"peft_type": "VERA", "r": 6, "vera_dropout": 0.1, "target_modules": "all-linear"}, 7, 11
        ),
        *([] if targets.transposed else [case("loha", loha("all-linear", r=3), 5, 9)]),
    ]


def in_turns(plan: Plan, pieces: Pieces) -> Plan:
    """The plan with Algorithm 1's launch order in each bucket of several hybrid tasks."""

    def order(count: int, bucket: Bucket) -> str:
        return encode(kahn([[PieceCost(1.0, 1.0)] * count] * bucket.batches))

    def launch(bucket: Bucket) -> tuple[LaunchOrder, ...]:
        one = LaunchOrder(order(pieces.forward, bucket), order(pieces.backward, bucket))
        return (one,) * plan.stages if bucket.batches > 1 else ()

    return replace(plan, buckets=tuple(replace(b, launch=launch(b)) for b in plan.buckets))


def planning_of(
    policy: str, backbone: Backbone, parallel: Parallel, cases: list[Case], split: Split
) -> Planning:
    """`chunks`: spatial, packs cut; `auto`: planned; `side by side`: a bucket of several hybrid tasks, cut; `in turns`:
    the same, its pieces in Algorithm 1's order; `halves`: a hybrid task of all in two halves, likewise.
    """
    mesh = Mesh(parallel.tp_size, parallel.pp_size, parallel.dp_size, split)
    shape = backbone.info.shape
    about = {"device": "made-up", "kind": "cpu", "threads": 1}
    planner = Planner(PlanningContext(roofline(shape, about, 8, mesh.tensor), backbone.info, mesh, 8))
    if policy == "auto":
        return Planning("auto", mesh.stages, planner)
    if policy == "halves":
        one = HybridTask(tuple(sorted(case.name for case in cases)))
        bucket = Bucket((one,), 2, forward=(1.0,) * mesh.stages, backward=(1.0,) * mesh.stages, halves=True)
        plan = Plan("auto", mesh.stages, (bucket,), mesh.virtual, split, data=mesh.data)
        return Planning("auto", mesh.stages, planner, given=in_turns(plan, backbone.pieces))
    if policy in ("side by side", "in turns"):
        names = sorted(case.name for case in cases)
        groups = [names[:2], names[2:3], names[3:]]
        hybrids = [HybridTask(tuple(group)) for group in groups]
        seconds = {"forward": (1.0,) * mesh.stages, "backward": (1.0,) * mesh.stages}
        buckets = (
            Bucket(tuple(hybrids[:2]), 3, chunk=8, **seconds),  # type: ignore[arg-type]
            Bucket((hybrids[2],), 2, **seconds),  # type: ignore[arg-type]
        )
        plan = Plan("auto", mesh.stages, buckets, mesh.virtual, split, data=mesh.data)
        given = plan if policy == "side by side" else in_turns(plan, backbone.pieces)
        return Planning("auto", mesh.stages, planner, given=given)
    stages = {"stages": mesh.stages, "virtual": mesh.virtual, "split": split}
    if policy == "chunks":
        return Planning("spatial", chunk=8, **stages)  # type: ignore[arg-type]
    if policy in ("gpipe", "interleaved"):
        return Planning("spatial", micro_batches=4, schedule=policy, **stages)  # type: ignore[arg-type]
    return Planning(policy, **stages)  # type: ignore[arg-type]


def train_on(
    joined: Callable[..., Parallel],
    path: Path,
    cases: list[Case],
    layout: Layout,
    policy: str,
    residence: Kind = "resident",
    recompute: Recompute = "none",
) -> tuple[Results, Tensors]:
    parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
    stages = load_stages(path, parallel, torch.float64, recompute, layout.split or None, residence)
    engine = Engine(stages, parallel, planning_of(policy, stages[0], parallel, cases, layout.split))
    engine.register_tasks([case.task for case in cases])
    # One by itself, then the others without a flush between them; the reference one at a time.
    taken = (
        [engine.step() for _ in range(STEPS)] if layout == LAYOUTS[0] and policy in PLAIN else [engine.step()]
    )
    while len(taken) < STEPS:
        taken += engine.steps(STEPS - len(taken))
    assert len(taken) == STEPS
    results = [{n: (r.loss, r.grad_norm, r.tokens) for n, r in step.items()} for step in taken]
    tensors: Tensors = {case.name: engine.adapter_tensors(case.name) for case in cases}
    return results, tensors


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, ...], tuple[Results, Tensors]]:
    """What each policy without a pipeline made of each family, or of tasks of these names."""
    return {}


@pytest.mark.parametrize(("family", "policy"), PAIRS)
def test_every_layout_gives_the_same_adapters(
    family: str,
    policy: str,
    once: Callable[[str, Callable[[Path], object]], Path],
    joined: Callable[..., Parallel],
    references: dict[tuple[str, ...], tuple[Results, Tensors]],
) -> None:
    path = once(f"layouts-{family}", lambda directory: tiny_models.make(directory, family))
    cases = cases_of(family, 96)
    plain = policy if policy in PLAIN else "spatial"
    if (family, plain) not in references:
        references[family, plain] = train_on(joined, path / family, cases, LAYOUTS[0], plain)
    problems: list[str] = []
    for layout in PAIRS[family, policy]:
        found = train_on(joined, path / family, cases, layout, policy)
        problems += differences(found, references[family, plain], str(layout))
    assert_no_problems(problems)


@pytest.mark.parametrize(
    ("layout", "policy", "residence"),
    [
        (LAYOUTS[9], "spatial", "resident"),
        (LAYOUTS[5], "side by side", "resident"),
        (LAYOUTS[6], "in turns", "resident"),
        (LAYOUTS[8], "in turns", "offloaded"),
        (LAYOUTS[3], "spatial", "sharded"),
        (LAYOUTS[9], "temporal", "offloaded"),
    ],
)
def test_nothing_is_back_propagated_below_all_adapters(
    layout: Layout,
    policy: str,
    residence: Kind,
    once: Callable[[str, Callable[[Path], object]], Path],
    joined: Callable[..., Parallel],
    references: dict[tuple[str, ...], tuple[Results, Tensors]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks of which one trains the third of four layers, others the last one; side by side also the second."""
    path = once("layouts-llama", lambda directory: tiny_models.make(directory, "llama")) / "llama"
    targets = {
        "also": "layers.3.self_attn.q_proj",
        "last": "layers.3.mlp.up_proj",
        "third": "layers.2.self_attn.o_proj",
    }
    if policy in ("side by side", "in turns"):
        targets["below"] = "layers.1.self_attn.q_proj"  # in one bucket with `also`
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 8, "seed": 3}
    cases = [
        Case(
            name,
            {"peft_type": "LORA", "r": 4, "target_modules": [own]},
            training,
            random_records(7, 96, 3, 12, seed=len(name)),
        )
        for name, own in targets.items()
    ]
    if tuple(targets) not in references:
        references[tuple(targets)] = train_on(joined, path, cases, LAYOUTS[0], "spatial")
    wanted = references[tuple(targets)]
    sent: set[int] = set()
    send = Communicator.send

    def counted(self: Communicator, tensor: Tensor, backward: bool) -> None:
        if backward and tensor.numel() and tensor.dim() == 3:
            sent.add(self.parallel.pp_rank)
        send(self, tensor, backward)

    monkeypatch.setattr(Communicator, "send", counted)
    problems = differences(train_on(joined, path, cases, layout, policy, residence), wanted, str(layout))
    if layout == LAYOUTS[9] and sent != ({3} if dist.get_rank() == 3 else set()):
        problems.append(f"gradients were sent by {sent}")
    assert_no_problems(problems)


def differences(found: tuple[Results, Tensors], wanted: tuple[Results, Tensors], what: str) -> list[str]:
    """Where results and, on rank 0, adapters differ."""
    problems: list[str] = []
    for step, (results, expected) in enumerate(zip(found[0], wanted[0], strict=True)):
        assert set(results) == set(expected)
        problems += [
            f"{what} {name} step {step}: {results[name]} != {expected[name]}"
            for name in expected
            if results[name] != pytest.approx(expected[name], rel=2e-6)
        ]
    if dist.get_rank() == 0:
        for name, tensors in wanted[1].items():
            try:
                assert_close(found[1][name] or {}, tensors or {}, 1e-9, f"{what} {name}")
            except AssertionError as error:
                problems.append(str(error))
    return problems
