"""Accuracy of a sentiment task on a quantised backbone and on the same backbone in fp32.

    python benchmarks/quantised_accuracy.py --output benchmarks/results/quantised-accuracy-cpu-2-cores.json
    python benchmarks/quantised_accuracy.py --steps 120 --output FILE.json    # an hour; reviews are taken four times

LoRA tasks that differ in their seed alone are trained together on each backbone, on short movie reviews of the
quickstart (run `make quickstart` first), and tested on others. A review counts as right if the word of its sentiment is
likelier than the other one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from script import (
    QUICKSTART,
    add_machine,
    add_output,
    command_line,
    environment,
    measured_on,
    publish,
    table,
)

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
        choices=("float32", "nf4", "int8", "fp8"),
    )
    add_machine(parser, device=False)
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = build_parser().parse_args(argv)
    import torch

    from megatron_mux.runtime import initialize

    torch.set_num_threads(arguments.threads)
    parallel = initialize(device="cpu")
    training, test = reviews(arguments.steps * arguments.batch, arguments.records)
    result: dict[str, Any] = environment("SmolLM2-135M", "float32", arguments.threads)
    result |= {name: getattr(arguments, name) for name in ("records", "steps", "batch", "seeds")}
    result["right"] = {}
    for form in arguments.formats:
        engine = trained(form, parallel, training, arguments)
        groups = [test[i : i + _TESTED_AT_ONCE] for i in range(0, len(test), _TESTED_AT_ONCE)]
        result["right"][form] = [
            sum(count_right(engine, f"seed-{seed}", seed, group) for group in groups)
            for seed in range(arguments.seeds)
        ]
    publish(result, markdown(result), arguments.output)
    return 0


def reviews(train: int, test: int) -> tuple[list[_EXAMPLE], list[_EXAMPLE]]:
    """The shortest reviews, shuffled, as tokens and labels: to train on and to test on.

    Args:
        train: Reviews that the training asks for. If fewer are left beside those to test on, it takes them repeatedly.
        test: Reviews to test on.
    """
    import torch

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


def trained(form: str, parallel: Any, training: list[_EXAMPLE], arguments: argparse.Namespace) -> Engine:
    """An engine with a trained task for each seed on the backbone in this format."""
    from engine_bench import QV, spec_of

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.engine import Engine, Planning, Task
    from tests.reference.records import Records

    quantise: Any = None if form == "float32" else form
    backbone = Backbone.load(QUICKSTART / "backbone", parallel, quantise=quantise)
    engine = Engine(backbone, parallel, Planning("temporal", 1))
    schedule = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    for seed in range(arguments.seeds):
        spec = spec_of(
            f"seed-{seed}", QV, arguments.batch, 128, max_steps=arguments.steps, seed=seed, **schedule
        )
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"shuffle": True})})
        engine.register_tasks([Task(spec, Records(training).as_dataset())])
    for step in range(arguments.steps):
        losses = [round(one.loss, 3) for one in engine.step().values()]
        print(form, "step", step + 1, losses, file=sys.stderr, flush=True)
    return engine


def count_right(engine: Engine, name: str, seed: int, examples: Sequence[_EXAMPLE]) -> int:
    """How many reviews a task's adapter tells the sentiment of."""
    import torch

    from megatron_mux.batch.pack import PackedSequence, pack
    from megatron_mux.batch.packed_batch import activate
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
        shares = [100 * count / result["records"] for count in right]
        mean = sum(shares) / len(shares)
        rows.append([form, *(f"{share:.2f}%" for share in shares), f"{mean:.2f}%"])
    seeds = " | ".join(f"seed {seed}" for seed in range(result["seeds"]))
    told = (
        f"Share of {result['records']} held-out movie reviews that are told right, after {result['steps']} steps of "
        f"{result['batch']}:"
    )
    lines = [measured_on(result), "", told, "", *table(f"weights | {seeds} | mean", rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
