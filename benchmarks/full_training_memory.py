"""The peak memory of full fine-tuning as `--method ours` estimates it, against full-depth traces, family by family.

python benchmarks/full_training_memory.py                                           # twenty minutes
python benchmarks/full_training_memory.py --families llama gemma2
python benchmarks/full_training_memory.py --output benchmarks/results/full-training-memory.json

The estimate traces a few layers, with sequence lengths and batches of its own choice; it is compared at the full depth,
at other lengths and at other batches. A length that it had to trace all the same is marked. Nothing is measured: the
result is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.memory.tensors import Skeleton

BATCHES = (1, 7, 40)
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    # Options of the estimate, and the tokens of a sequence.
    "bf16": ({"master_weights": False}, 700),
    "bf16, recomputed": ({"master_weights": False, "recompute": True}, 600),
    "autocast": ({"optimizer": "rmsprop"}, 900),
    "autocast, recomputed": ({"optimizer": "rmsprop", "recompute": True}, 1000),
    "fp32": ({"precision": "fp32"}, 530),
    "bf16, eager attention": ({"master_weights": False, "attention": "eager"}, 660),
}
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024,
    "num_attention_heads": 8, "n_embd": 256, "n_head": 8, "ffn_dim": 512, "word_embed_proj_dim": 256, "d_model": 256,
    "n_heads": 8, "head_dim": 32, "sliding_window": 64,
}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--families", nargs="+", metavar="MODEL_TYPE", help="these alone")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate, trace, print."""
    arguments = parse(argv)
    from tests.unit.memory.trace.test_families import FAMILIES

    names = arguments.families or list(FAMILIES)
    result = {name: found for name in names if (found := family(name)) is not None}
    publish(result, markdown(result), arguments.output)
    return 0


def family(name: str) -> dict[str, Any]:
    """A family's deviation in each way, the worst of all batches, and whether the length was traced; or why it is
    refused.
    """
    from megatron_mux.errors import UserError

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        skeleton = model(name, Path(directory))
        for way, (options, length) in WAYS.items():
            try:
                lengths = set[int]()
                worst = max(deviations(skeleton, options, length, lengths), key=abs)
                found[way] = {"off": worst, "length_traced": length in lengths}
            except UserError as error:
                found[way] = str(error)
    print(name, found, file=sys.stderr, flush=True)
    return found


def model(name: str, directory: Path) -> Skeleton:
    """A small model of a family, deeper than what the estimate traces."""
    from megatron_mux.memory.tensors import Skeleton
    from tests.unit.memory.trace.test_families import FAMILIES, USUAL

    more, _, depth = FAMILIES[name]
    config = {
        "model_type": name,
        **USUAL,
        **more,
        "num_hidden_layers": depth,
        "n_layer": depth,
        "n_layers": depth,
    }
    config |= {key: value for key, value in SIZES.items() if key in config}
    (directory / "config.json").write_text(json.dumps(config))
    return Skeleton(directory / "config.json")


def deviations(skeleton: Skeleton, how: dict[str, Any], length: int, lengths: set[int]) -> Iterator[float]:
    """How far estimates are from the peak of a trace at full depth, for each batch; adds the lengths that they trace.

    Raises:
        UserError: The model is refused.
    """
    from megatron_mux.memory.forms.full_training import FullTrainingMemory
    from megatron_mux.memory.forms.method import ParallelConfig
    from megatron_mux.memory.forms.recipe import Recipe
    from megatron_mux.memory.forms.skeleton import read_architecture
    from megatron_mux.memory.question import Question
    from megatron_mux.memory.step_profile import StepProfiles
    from megatron_mux.memory.stream.events import Stream
    from megatron_mux.memory.trace import depth
    from megatron_mux.memory.trace.case import Case, Options
    from megatron_mux.memory.trace.training import trace
    from tests.unit.memory.stream.peak import peak_of

    options = Options(**how)
    recipe = Recipe(length, options.precision, options.optimizer, options.master_weights, options.attention)
    question = Question(skeleton, 1, 80 << 30, length, options=options)

    def steps(cases: Sequence[Case]) -> list[Stream]:
        lengths.update(case.length for case in cases)
        return [depth.step(case, lambda few: map(trace, few)) for case in cases]

    profiles = StepProfiles(question, recipe.autocast, steps)
    memory = FullTrainingMemory(
        read_architecture(skeleton),
        recipe,
        ParallelConfig(recompute="full" if options.recompute else "none"),
        profiles,
        device="cpu",
    )
    for batch in BATCHES:
        peak = peak_of(trace(options.case(skeleton.raw, skeleton.tensors, length, batch))).size
        phases = [phase.breakdown for phase in memory.phases(batch * length)]
        # Fragmentation, which traces do not have, may make another phase the worst.
        yield max(sum(parts.values()) - parts["fragmentation"] for parts in phases) / peak - 1


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    ways = list(WAYS)
    rows = [(name, *(shown(found[way]) for way in ways)) for name, found in result.items()]
    sizes = [one["off"] for found in result.values() for one in found.values() if isinstance(one, dict)]
    head = (
        "Peak memory of full fine-tuning on one GPU as estimated, against a trace of the whole model: the worst of "
        f"{', '.join(map(str, BATCHES))} sequences. The estimate traces fewer layers, other lengths (unless one is "
        "marked) and, except for a single sequence, other numbers of sequences. "
        f"Worst of all: {max(sizes, key=abs):+.2%}."
    )
    return "\n".join(
        [head, "", *table(" | ".join(("family", *(f"{way}, {WAYS[way][1]} tokens" for way in ways))), rows)]
    )


def shown(found: dict[str, Any] | str) -> str:
    """A deviation, or that the family is refused."""
    if isinstance(found, str):
        return "refused"
    return f"{found['off']:+.2%}" + " (length traced)" * found["length_traced"]


if __name__ == "__main__":
    sys.exit(main())
