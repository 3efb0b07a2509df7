"""What evaluating eight tasks together gains over one after another, and generating likewise.

    python benchmarks/evaluation.py --output benchmarks/results/evaluation-cpu-2-cores.json   # SmolLM2; minutes
    python benchmarks/evaluation.py --layout sharded              # one of the layouts
    python benchmarks/evaluation.py --backbone-shape tiny --rounds 1      # to try it out

Eight LoRA tasks (r=8, all linear modules) are evaluated one by one and together, in turns, in the same processes: on
one process, on a pipeline of two, and on two data-parallel processes that share the weights. Records are random tokens,
half of them labelled; sizes are records and tokens of each task. A ratio is the median over turns of the time of eight
evaluations over that of one of all tasks. `difference` is the largest relative difference of a figure between the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from processes import add_worker_flag, pin_to_core, run_in_processes
from script import (
    add_backbone,
    add_machine,
    add_output,
    command_line,
    environment,
    in_turns,
    measured_on,
    median_ratio,
    publish,
    table,
)

TASKS = 8
LAYOUTS = {
    "one": "one process",
    "pipeline": "pipeline of two processes",
    "sharded": "two processes that share the weights",
}
SIZES = ((4, 8), (8, 24))
"""Held-out records of each task, and tokens of each."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    add_backbone(parser)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="only this one")
    parser.add_argument("--rounds", type=int, default=5)
    add_machine(parser, device=False)
    add_output(parser)
    add_worker_flag(parser)
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"rounds": arguments.rounds, "cases": []}
    for layout in LAYOUTS if arguments.layout is None else (arguments.layout,):
        own = argparse.Namespace(**{**vars(arguments), "layout": layout})
        if layout == "one":
            found: dict[str, Any] | None = measure(own)
        else:
            flags = ("--backbone", "--backbone-shape", "--rounds", "--threads", "--layout")
            found = run_in_processes(own, 2, __file__, flags, measure)
        if found is None:  # one of these processes
            return 0
        result = {**found, **result, "cases": [*result["cases"], *found["cases"]]}
    publish(result, markdown(result), arguments.output)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of a layout; an empty result on other ranks than the first."""
    import torch
    from engine_bench import ALL_LINEAR, backbone_of, spec_of

    from megatron_mux.backbone.model import load_stages
    from megatron_mux.engine import Engine, Task
    from megatron_mux.runtime import initialize
    from tests.reference.records import Records

    alone = arguments.layout == "one"
    rank = 0 if alone else pin_to_core()
    torch.set_num_threads(arguments.threads if alone else 1)
    parallel = initialize(1, 2 if arguments.layout == "pipeline" else 1, device="cpu")
    residence: Any = "sharded" if arguments.layout == "sharded" else "resident"
    path = backbone_of(arguments, rank)
    engine = Engine(load_stages(path, parallel, torch.float32, residence=residence), parallel)
    records = Records([(torch.arange(8), torch.arange(8) > 4)]).as_dataset()
    specs = [spec_of(f"task-{i}", ALL_LINEAR, 1, 64, optim="sgd") for i in range(TASKS)]
    engine.register_tasks([Task(spec, records) for spec in specs])
    cases = [_evaluation(engine, arguments.rounds, *size) for size in SIZES]
    cases.append(_generation(engine, arguments.rounds))
    engine.close()
    described = environment(path.name, "float32", arguments.threads)
    return (
        {}
        if rank
        else {**described, "cases": [{"layout": LAYOUTS[arguments.layout], **own} for own in cases]}
    )


def _evaluation(engine: Any, rounds: int, records: int, tokens: int) -> dict[str, Any]:
    import torch

    from tests.reference.records import Records

    generator = torch.Generator().manual_seed(records)
    labelled, vocabulary = torch.arange(tokens) >= tokens // 2, engine.backbone.shape.vocab
    held_out = {
        name: Records(
            [(torch.randint(0, vocabulary, (tokens,), generator=generator), labelled) for _ in range(records)]
        ).as_dataset()
        for name in engine.tasks
    }

    def one_by_one() -> dict[str, Any]:
        return {name: engine.evaluate(name, own) for name, own in held_out.items()}

    def together() -> Any:
        return engine.evaluate_together(engine.tasks, held_out)

    apart, joint = one_by_one(), together()
    difference = max(
        abs(joint[name].values[key] - value) / max(abs(value), 1e-12)
        for name in held_out
        for key, value in apart[name].values.items()
    )
    what = f"loss and accuracy, {records} records of {tokens} tokens"
    return {"what": what, "difference": difference, **_compared(one_by_one, together, rounds)}


def _generation(engine: Any, rounds: int) -> dict[str, Any]:
    import numpy as np

    from megatron_mux.engine.generation.passes import Prompt

    chosen = np.random.default_rng(0)
    own = {
        name: [
            Prompt(name, chosen.integers(0, engine.backbone.shape.vocab, PROMPT_TOKENS), NEW_TOKENS)
            for _ in range(PROMPTS)
        ]
        for name in engine.tasks
    }
    prompts = [prompt for some in own.values() for prompt in some]

    def one_by_one() -> list[Any]:
        return [one for some in own.values() for one in engine.generate(some, [])]

    def together() -> list[Any]:
        return list(engine.generate(prompts, []))

    pairs = list(zip(one_by_one(), together(), strict=True))
    difference = sum(apart != joint for apart, joint in pairs) / len(pairs)
    what = f"generation, {PROMPTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones"
    return {"what": what, "difference": difference, **_compared(one_by_one, together, rounds)}


def _compared(
    one_by_one: Callable[[], object], together: Callable[[], object], rounds: int
) -> dict[str, float]:
    apart, joint = in_turns((one_by_one, together), rounds, warm_up=0)
    return {
        "one_by_one_s": statistics.median(apart),
        "together_s": statistics.median(joint),
        "ratio": median_ratio(apart, joint),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    rows = [
        (
            case["layout"],
            case["what"],
            f"{case['one_by_one_s']:.2f} s",
            f"{case['together_s']:.2f} s",
            f"{case['ratio']:.2f}",
            f"{case['difference']:.0e}",
        )
        for case in result["cases"]
    ]
    about = f"{TASKS} LoRA tasks (r=8, all linear modules); medians of {result['rounds']} turns."
    lines = table("layout | each task has | one by one | together | ratio | difference", rows)
    return "\n".join([measured_on(result), about, "", *lines])


if __name__ == "__main__":
    sys.exit(main())
