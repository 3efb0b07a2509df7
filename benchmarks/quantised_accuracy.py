"""Accuracy of a sentiment task on a quantised backbone and on the same backbone in fp32.

    python benchmarks/quantised_accuracy.py --output benchmarks/results/quantised-accuracy-cpu-2-cores.json
    python benchmarks/quantised_accuracy.py --formats fp8 fp8-products --seeds 1 --steps 20 --batch 4 --records 64
        --output benchmarks/results/fp8-products-cpu-2-cores.json

LoRA tasks that differ in their seed alone are trained together on each backbone, on short movie reviews of the
quickstart (run `make quickstart` first), and tested on others. A review counts as right if the word of its sentiment is
likelier than the other one. What `--output` has already is not measured again, so a run can be continued.

`fp8-products` emulates a GPU's products of FP8 with FP8: weights are in FP8, and the inputs of frozen products are
rounded to e4m3 with a scale for each row. Gradients go through the rounding unchanged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from script import add_machine, add_output, command_line, measured_on, publish, table

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_mux.engine import Engine

WORDS = " positive", " negative"
_TESTED_AT_ONCE = 64
_EXAMPLE = tuple["Tensor", "Tensor"]


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--records", type=int, default=4000, help="reviews to test each seed's adapter on (4000)"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of training; more than 31 take some reviews again (30)"
    )
    parser.add_argument("--batch", type=int, default=16, help="reviews of a step (16)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["float32", "nf4"],
        choices=("float32", "nf4", "int8", "fp8", "fp8-products"),
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, to be continued")
    add_machine(parser, device=False)
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    import torch
    from engine_bench import environment

    from megatron_mux.runtime import initialize

    torch.set_num_threads(arguments.threads)
    parallel = initialize(device="cpu")
    asked = {name: getattr(arguments, name) for name in ("records", "steps", "batch", "seeds")}
    result: dict[str, Any] = {**asked, "right": {}, "tested": {}}
    if arguments.output is not None and arguments.output.is_file():
        result = json.loads(arguments.output.read_text())
        if any(result[name] != value for name, value in asked.items()):
            parser.error(f"{arguments.output} has another size: give another file")
    training, test = reviews(asked["steps"] * asked["batch"], asked["records"])
    start = time.perf_counter()
    for form in arguments.formats:
        if result["tested"].get(form, 0) >= len(test):
            continue
        kept = (
            None
            if arguments.output is None
            else arguments.output.with_name(f"{arguments.output.stem}.{form}.pt")
        )
        with rounded_inputs() if form == "fp8-products" else nullcontext():
            backbone, engine, losses = trained(form, parallel, training, asked, kept)
            result |= environment(backbone, arguments.threads)
            if losses:
                result.setdefault("losses", {})[form] = losses
            right, tested = result["right"].setdefault(form, [0] * asked["seeds"]), result["tested"]
            for first in range(tested.get(form, 0), len(test), _TESTED_AT_ONCE):
                group = test[first : first + _TESTED_AT_ONCE]
                for seed in range(asked["seeds"]):
                    right[seed] += count_right(engine, f"seed-{seed}", seed, group)
                tested[form] = tested.get(form, 0) + len(group)
                if arguments.output is not None:
                    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
                if time.perf_counter() - start > arguments.minutes * 60:
                    print(f"{form}: tested {tested[form]}, to be continued", file=sys.stderr)
                    return 0
            del engine, backbone
        if kept is not None:
            kept.unlink()
    publish(result, markdown(result), arguments.output)
    return 0


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Context in which frozen products, which alone call `F.linear`, round their inputs as products of FP8 do."""
    import torch
    import torch.nn.functional as F

    linear, largest = F.linear, torch.finfo(torch.float8_e4m3fn).max

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        exact = x.detach()
        scale = exact.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
        rounded = (exact / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return linear(x + (rounded - exact), weight, bias)

    with mock.patch.object(F, "linear", product):
        yield


def reviews(train: int, test: int) -> tuple[list[_EXAMPLE], list[_EXAMPLE]]:
    """The shortest reviews, shuffled, as tokens and labels: to train on and to test on.

    Args:
        train: Reviews that the training asks for. If fewer are left beside those to test on, it takes them repeatedly.
        test: Reviews to test on.
    """
    import torch
    from engine_bench import QUICKSTART

    from megatron_mux.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(QUICKSTART / "backbone")
    records = [
        json.loads(line)
        for name in ("movie", "movie.eval")
        for line in (QUICKSTART / "data" / f"{name}.jsonl").read_text().splitlines()
    ]
    examples = []
    for record in records:
        tokens = torch.tensor(tokenizer(record["prompt"] + record["completion"])["input_ids"])
        examples.append((tokens, torch.arange(len(tokens)) == len(tokens) - 1))
    examples.sort(key=lambda example: len(example[0]))
    train = min(train, len(examples) - test)
    if train < 1:
        raise SystemExit(
            f"There are {len(examples)} reviews, but {test} to test on are asked for: leave some"
        )
    chosen = examples[: train + test]
    random.Random(1).shuffle(chosen)
    return chosen[:train], chosen[train:]


def trained(
    form: str, parallel: Any, training: list[_EXAMPLE], asked: dict[str, int], kept: Path | None
) -> tuple[Any, Engine, list[list[float]]]:
    """An engine with a trained task for each seed on the backbone in this format, and each step's losses by seed.

    Args:
        form: The format.
        parallel: This process.
        training: What to train on.
        asked: Sizes.
        kept: Where adapters are, or will be, for a run that is continued.
    """
    import torch
    from engine_bench import QUICKSTART

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.engine import Engine, Planning, Task
    from megatron_mux.tasks import TaskSpec
    from tests.reference.records import Records

    quantise: Any = None if form == "float32" else form.removesuffix("-products")
    backbone = Backbone.load(QUICKSTART / "backbone", parallel, quantise=quantise)
    engine = Engine(backbone, parallel, Planning("temporal", 1))
    adapters = torch.load(kept, weights_only=True) if kept is not None and kept.is_file() else None
    for seed in range(asked["seeds"]):
        spec = TaskSpec.model_validate(
            {
                "name": f"seed-{seed}",
                "adapter": {
                    "peft_type": "LORA",
                    "r": 8,
                    "lora_alpha": 16,
                    "target_modules": ["q_proj", "v_proj"],
                },
                "data": {"path": "reviews", "max_length": 128},
                "training": {
                    "per_device_train_batch_size": asked["batch"],
                    "learning_rate": 1e-3,
                    "lr_scheduler_type": "cosine",
                    "warmup_steps": 3,
                    "max_steps": asked["steps"],
                    "seed": seed,
                },
            }
        )
        initial = None if adapters is None else adapters[spec.name]
        engine.register_tasks([Task(spec, Records(training).as_dataset(), initial=initial)])
    losses = []
    for step in range(asked["steps"] if adapters is None else 0):
        taken = engine.step()
        losses.append([taken[f"seed-{seed}"].loss for seed in range(asked["seeds"])])
        print(form, "step", step + 1, [round(loss, 3) for loss in losses[-1]], file=sys.stderr, flush=True)
    if kept is not None and adapters is None:
        names = [f"seed-{seed}" for seed in range(asked["seeds"])]
        torch.save({name: engine.adapter_tensors(name) for name in names}, kept)
    return backbone, engine, losses


def count_right(engine: Engine, name: str, seed: int, examples: Sequence[_EXAMPLE]) -> int:
    """How many reviews a task's adapter tells the sentiment of."""
    import torch
    from engine_bench import QUICKSTART

    from megatron_mux.batch.micro_batch import activate
    from megatron_mux.batch.pack import PackedSequence, pack
    from megatron_mux.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(QUICKSTART / "backbone")
    words = torch.tensor([tokenizer(word)["input_ids"][0] for word in WORDS])
    sequences = [PackedSequence(name, i, tokens, labels, 1.0) for i, (tokens, labels) in enumerate(examples)]
    slot = engine.adapters.tasks[name].slot
    batch = pack(sequences, (name,), {name: seed}, training=False, slots={name: slot}).to()
    backbone = engine.backbone
    with torch.no_grad(), activate(batch):
        hidden = backbone.forward(batch, labelled_only=True).squeeze(1)
    weight = backbone.model.output_layer.weight[words]
    found = words[(hidden @ weight.t()).argmax(dim=1)]
    return int((found == batch.labels).sum())


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for form, right in result["right"].items():
        shares = [100 * count / result["tested"][form] for count in right]
        mean = sum(shares) / len(shares)
        rows.append([form, *(f"{share:.2f}%" for share in shares), f"{mean:.2f}%"])
    seeds = " | ".join(f"seed {seed}" for seed in range(result["seeds"]))
    told = (
        f"Share of {result['records']} held-out movie reviews that are told right, after {result['steps']} steps of "
        f"{result['batch']}:"
    )
    head = measured_on("SmolLM2-135M", "float32", result["hardware"], result["versions"])
    lines = [head, "", told, "", *table(f"weights | {seeds} | mean", rows)]
    losses = result.get("losses", {})
    if {"fp8", "fp8-products"} <= losses.keys():
        steps = zip(losses["fp8"], losses["fp8-products"], strict=True)
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        most = max(abs(rounded - exact) / exact for exact, rounded in pairs)
        lines += ["", f"Losses with FP8 products differ from those with FP8 weights by at most {most:.1%}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
