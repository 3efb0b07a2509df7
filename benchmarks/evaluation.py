"""What evaluating eight tasks together gains over one after another, and generating likewise.

    python benchmarks/evaluation.py --output benchmarks/results/evaluation-cpu-2-cores.json   # SmolLM2; minutes
    python benchmarks/evaluation.py --layout sharded --output FILE.json   # alone; the others stay as they are in FILE
    python benchmarks/evaluation.py --backbone-shape tiny --rounds 1      # to try it out

Eight LoRA tasks (r=8, all linear modules) are evaluated one by one and together, in turns, in the same processes: on
one process, on a pipeline of two, and on two data-parallel processes that share the weights. Records are random tokens,
half of them labelled; sizes are records and tokens of each task. A ratio is the median over turns of the time of eight
evaluations over that of one of all tasks. `difference` is the largest relative difference of a figure between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import add_worker_flag, pin_to_core, run_in_processes
from script import add_machine, add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

TASKS = 8
LAYOUTS = {
    "one": "one process",
    "pipeline": "pipeline of two processes",
    "sharded": "two processes that share the weights",
}
SIZES = ((4, 8), (8, 24))
"""Held-out records of each task, and tokens of each."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 8
_FLAGS = ("--backbone", "--backbone-shape", "--rounds", "--threads", "--layout")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, default=ROOT / ".quickstart" / "backbone")
    parser.add_argument("--backbone-shape", choices=("tiny", "mid"), help="a random backbone instead")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="only this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    add_machine(parser, device=False)
    add_output(parser)
    add_worker_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    arguments = parse(argv)
    if arguments.worker is not None:
        run_in_processes(arguments, 2, __file__, _FLAGS, measure)
        return 0
    layouts = tuple(LAYOUTS) if arguments.layout is None else (arguments.layout,)
    cases: list[dict[str, Any]] = []
    if arguments.output is not None and arguments.output.exists():
        measured = [LAYOUTS[layout] for layout in layouts]
        before = json.loads(arguments.output.read_text())["cases"]
        cases = [case for case in before if case["layout"] not in measured]
    machine: dict[str, Any] = {}
    for layout in layouts:
        own = argparse.Namespace(**{**vars(arguments), "layout": layout})
        found = measure(own) if layout == "one" else run_in_processes(own, 2, __file__, _FLAGS, measure)
        assert found is not None
        cases += found.pop("cases")
        machine = machine or found
    cases.sort(key=lambda case: list(LAYOUTS.values()).index(case["layout"]))
    result = {**machine, "rounds": arguments.rounds, "cases": cases}
    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of a layout; an empty result on other ranks than the first."""
    import torch
    from workload import write_random_backbone

    from megatron_mux.backbone.model import load_stages
    from megatron_mux.engine import Engine
    from megatron_mux.fusion.device import cpu_name
    from megatron_mux.runtime import initialize

    alone = arguments.layout == "one"
    rank = 0 if alone else pin_to_core()
    torch.set_num_threads(arguments.threads if alone else 1)
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.backbone
        if arguments.backbone_shape is not None:
            path = Path(directory) / arguments.backbone_shape
            write_random_backbone(arguments.backbone_shape, path, torch.float32)
        parallel = initialize(1, 2 if arguments.layout == "pipeline" else 1, device="cpu")
        residence: Any = "sharded" if arguments.layout == "sharded" else "resident"
        stages = load_stages(path, parallel, torch.float32, residence=residence)
    engine = Engine(stages, parallel)
    engine.register_tasks([_task(i) for i in range(TASKS)])
    vocabulary = stages[0].shape.vocab
    cases = [_evaluation(engine, arguments, vocabulary, *size) for size in SIZES]
    cases.append(_generation(engine, arguments, vocabulary))
    engine.close()
    if rank:
        return {}
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if alone else 2,
        "threads": arguments.threads,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "backbone": arguments.backbone_shape or "SmolLM2-135M-Instruct",
        "cases": cases,
    }


def _task(number: int) -> Any:
    import torch

    from megatron_mux.engine import Task
    from megatron_mux.tasks import TaskSpec
    from tests.reference.records import Records

    section = {
        "name": f"task-{number}",
        "adapter": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "data": {"path": "made-up", "max_length": 64},
        "training": {"per_device_train_batch_size": 1, "max_steps": 1, "optim": "sgd"},
    }
    record = torch.arange(8), torch.arange(8) > 4
    return Task(TaskSpec.model_validate(section), Records([record]).as_dataset())


def _evaluation(
    engine: Any, arguments: argparse.Namespace, vocabulary: int, records: int, tokens: int
) -> dict[str, Any]:
    import torch

    from tests.reference.records import Records

    generator = torch.Generator().manual_seed(records)
    labelled = torch.arange(tokens) >= tokens // 2
    held_out = {
        name: Records(
            [(torch.randint(0, vocabulary, (tokens,), generator=generator), labelled) for _ in range(records)]
        ).as_dataset()
        for name in engine.tasks
    }

    def one_by_one() -> dict[str, Any]:
        return {name: engine.evaluate(name, own) for name, own in held_out.items()}

    def together() -> Mapping[str, Any]:
        return engine.evaluate_together(engine.tasks, held_out)

    apart, joint = one_by_one(), together()  # they warm up, too
    difference = max(
        abs(joint[name].values[key] - value) / max(abs(value), 1e-12)
        for name in held_out
        for key, value in apart[name].values.items()
    )
    what = f"loss and accuracy, {records} records of {tokens} tokens"
    return _case(arguments, what, _turns(one_by_one, together, arguments.rounds), difference)


def _generation(engine: Any, arguments: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    import numpy as np

    from megatron_mux.engine.generate import Prompt

    chosen = np.random.default_rng(0)
    prompts = [
        Prompt(name, chosen.integers(0, vocabulary, PROMPT_TOKENS), NEW_TOKENS)
        for name in engine.tasks
        for _ in range(PROMPTS)
    ]
    own = {name: [prompt for prompt in prompts if prompt.task == name] for name in engine.tasks}

    def one_by_one() -> list[Any]:
        return [one for some in own.values() for one in engine.generate(some, [])]

    def together() -> list[Any]:
        return list(engine.generate(prompts, []))

    pairs = list(zip(one_by_one(), together(), strict=True))
    difference = sum(apart != joint for apart, joint in pairs) / len(pairs)
    what = f"generation, {PROMPTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones"
    return _case(arguments, what, _turns(one_by_one, together, arguments.rounds), difference)


def _turns(
    one_by_one: Callable[[], object], together: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each in turns, whatever goes on beside them."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for seconds, turn in zip(found, (one_by_one, together), strict=True):
            start = time.perf_counter()
            turn()
            seconds.append(time.perf_counter() - start)
    return found


def _case(
    arguments: argparse.Namespace, what: str, seconds: tuple[list[float], list[float]], difference: float
) -> dict[str, Any]:
    ratios = [apart / joint for apart, joint in zip(*seconds, strict=True)]
    if os.environ.get("RANK", "0") == "0":
        print(f"{LAYOUTS[arguments.layout]}: {what}: {statistics.median(ratios):.2f}", file=sys.stderr)
    return {
        "layout": LAYOUTS[arguments.layout],
        "what": what,
        "one_by_one_s": statistics.median(seconds[0]),
        "together_s": statistics.median(seconds[1]),
        "ratio": statistics.median(ratios),
        "difference": difference,
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
    about = (
        f"{TASKS} LoRA tasks (r=8, all linear modules) on {result['backbone']}, fp32; {result['cpu']}, "
        f"{result['cores']} cores, torch {result['torch']}; medians of {result['rounds']} turns."
    )
    return "\n".join(
        [about, "", *table("layout | each task has | one by one | together | ratio | difference", rows)]
    )


if __name__ == "__main__":
    sys.exit(main())
