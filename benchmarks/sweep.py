"""Sixteen configurations of one task: stopped early by successive halving, all in full, chosen at random, with `peft`.

    python benchmarks/sweep.py --output benchmarks/results/sweep-cpu-2-cores.json    # three seeds: an hour or two
    python benchmarks/sweep.py --seeds 0 --skip-peft                                 # one seed, without peft

Each seed has two runs of `pretrain_mux.py` with the same sixteen configurations (ranks x learning rates x modules) on
the quickstart's sentiment task, in turns: with `scheduler: {type: halving}`, and all in full. Seconds are of whole
commands, start and evaluations included; a short run before is not counted, so that no side reads the backbone from
a cold disk. What a random choice of as many steps finds is computed from the run in full: the mean, over all choices,
of the best of so many configurations, between two whole numbers in proportion. With `peft` four configurations are
trained one after another and evaluated at their end, and their seconds multiplied by four; they find their records
tokenised, and import nothing of ours.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

import yaml
from script import QUICKSTART, ROOT, add_output, command_line, environment, measured_on, publish, table

RANKS, RATES = (4, 16), (1e-4, 3e-4, 1e-3, 1e-2)
TARGETS: tuple[list[str] | str, ...] = (["q_proj", "v_proj"], "all-linear")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MEASURED = 4
"""Configurations that `peft` trains; the others are taken to last as long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=36, help="of each configuration in full")
    parser.add_argument("--min-steps", type=int, default=4, help="the first rung")
    parser.add_argument("--factor", type=int, default=2, help="one of so many goes on at a rung")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=64, help="records of an evaluation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip-peft", action="store_true")
    parser.add_argument("--peft", nargs=3, metavar=("R", "RATE", "RECORDS"), help=argparse.SUPPRESS)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.peft is not None:
        rank, rate, records = arguments.peft
        print(json.dumps(_train_with_peft(arguments, int(rank), float(rate), Path(records))))
        return 0
    result = environment("SmolLM2-135M-Instruct", "float32", arguments.threads) | {
        "configurations": len(RANKS) * len(RATES) * len(TARGETS),
        "steps": arguments.steps,
        "factor": arguments.factor,
        "batch": arguments.batch,
        "held_out": arguments.held_out,
        "seeds": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.skip_peft:
            result["peft"] = _peft(arguments, Path(folder))
        lines = (QUICKSTART / "data" / "movie.eval.jsonl").read_text().splitlines()[: arguments.held_out]
        (Path(folder) / "held-out.jsonl").write_text("\n".join(lines) + "\n")
        short = argparse.Namespace(**vars(arguments) | {"steps": 1})
        _run(_tasks("none", 0, short, Path(folder)), Path(folder) / "unmeasured", arguments.threads)
        for turn, seed in enumerate(arguments.seeds):
            result["seeds"].append(_seed(seed, arguments, Path(folder), turn))
            publish(result, markdown(result), arguments.output)  # an hour's work is not lost by a kill
    return 0


def _seed(seed: int, arguments: argparse.Namespace, folder: Path, turn: int) -> dict[str, Any]:
    """Both runs of a seed; which comes first changes from seed to seed."""
    found: dict[str, Any] = {"seed": seed}
    for kind in ("halving", "none")[:: 1 - 2 * (turn % 2)]:
        directory = folder / f"{kind}-{seed}"
        seconds = _run(_tasks(kind, seed, arguments, folder), directory, arguments.threads)
        rows = list(csv.DictReader((directory / "results.csv").open()))
        found[kind] = {
            "seconds": seconds,
            "best": rows[0]["task"],
            "loss": float(rows[0]["eval_loss"]),
            "steps": sum(int(row["steps"]) for row in rows),
            "losses": {row["task"]: float(row["eval_loss"]) for row in rows},
        }
        print(
            f"seed {seed}, {kind}: {seconds:.0f} s, {rows[0]['task']} {rows[0]['eval_loss']}", file=sys.stderr
        )
    losses = sorted(found["none"]["losses"].values())
    tried = found["halving"]["steps"] / arguments.steps
    found["random"] = {"tried": tried, "loss": expected_best(losses, tried)}
    worst = losses[-len(losses) // 4 :]
    found["worst_quarter"] = min(worst) / losses[0] - 1
    return found


def expected_best(losses: Sequence[float], tried: float) -> float:
    """The mean, over all choices of `tried` configurations, of their least loss; `losses` are sorted.

    Of 3.25 configurations: three in three of four cases, else four, so that steps are 3.25 times those of one.
    """
    count, whole = len(losses), int(tried)
    least = sum(loss * comb(count - 1 - i, whole - 1) for i, loss in enumerate(losses)) / comb(count, whole)
    if whole == tried:
        return least
    return least + (tried - whole) * (expected_best(losses, whole + 1) - least)


def _tasks(kind: str, seed: int, arguments: argparse.Namespace, folder: Path) -> Path:
    """The task file of a run."""
    data = QUICKSTART / "data"
    scheduler = {"type": kind} | (
        {"min_steps": arguments.min_steps, "factor": arguments.factor} if kind == "halving" else {}
    )
    task = {
        "name": "movie",
        "adapter": {"peft_type": "LORA", "lora_alpha": 16},
        "data": {"path": str(data / "movie.jsonl"), "max_length": 80},
        "training": {
            "per_device_train_batch_size": arguments.batch,
            "lr_scheduler_type": "cosine",
            "max_steps": arguments.steps,
            "seed": seed,
        },
        "eval": {"path": "held-out.jsonl", "eval_steps": arguments.steps, "metrics": []},
        "sweep": {
            "adapter.r": [*RANKS],
            "training.learning_rate": [*RATES],
            "adapter.target_modules": [*TARGETS],
        },
    }
    file = folder / f"{kind}-{seed}.yaml"
    file.write_text(yaml.safe_dump({"scheduler": scheduler, "tasks": [task]}, sort_keys=False))
    return file


def _run(tasks: Path, save: Path, threads: int) -> float:
    """Seconds of a whole command."""
    words = ["--backbone", QUICKSTART / "backbone", "--mux-tasks", tasks, "--save", save, "--mux-fp32"]
    return _timed([ROOT / "pretrain_mux.py", *words, "--mux-no-progress"], threads)[0]


def _timed(words: Sequence[object], threads: int) -> tuple[float, str]:
    """Seconds of a Python script in a process of its own, and what it prints."""
    usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=os.environ | usual, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - began, done.stdout


def _peft(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of some configurations with `peft`, each in a process of its own, as a script of one's own would."""
    records = folder / "records.json"
    records.write_text(json.dumps(_records(arguments)))
    script = [__file__, "--steps", arguments.steps, "--threads", arguments.threads, "--peft"]
    # Not measured: the first reads the backbone from disk.
    _timed([*script, min(RANKS), RATES[0], records], arguments.threads)
    seconds = [
        _timed([*script, r, rate, records], arguments.threads)[0] for r in RANKS for rate in RATES[::2]
    ]
    assert len(seconds) == MEASURED
    whole = sum(seconds) / MEASURED * len(RANKS) * len(RATES) * len(TARGETS)
    return {"measured": seconds, "all": whole}


def _records(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens, and which of them are labels, of each step's records and of those held out."""
    from mux_side import examples, spec
    from workload import TaskShape

    from megatron_mux.data.dataset import TaskDataset
    from megatron_mux.data.tokenizer import load_tokenizer

    tokenizer, data = load_tokenizer(QUICKSTART / "backbone"), QUICKSTART / "data"
    records, held_out = (
        TaskDataset(data / name, tokenizer, 80) for name in ("movie.jsonl", "movie.eval.jsonl")
    )
    task = spec(TaskShape("movie", arguments.batch, 80, "movie.jsonl"), LINEAR, arguments.steps, 0)
    steps = examples(task, records, arguments.steps)
    found = [held_out[i] for i in range(arguments.held_out)]
    return {
        "steps": [[[tokens.tolist(), labelled.tolist()] for tokens, labelled in batch] for batch in steps],
        "held_out": [[own.tokens.tolist(), own.labelled.tolist()] for own in found],
    }


def _train_with_peft(arguments: argparse.Namespace, rank: int, rate: float, file: Path) -> dict[str, float]:
    """Train and evaluate one configuration with `peft`: sequences packed, as it is fastest."""
    import peft_side
    import torch

    torch.set_num_threads(arguments.threads)
    records = json.loads(file.read_text())
    steps, held_out = (
        [[(torch.tensor(tokens), torch.tensor(labelled)) for tokens, labelled in batch] for batch in batches]
        for batches in (records["steps"], [records["held_out"]])
    )
    # Half of the configurations adapt all linear modules.
    targets = LINEAR if rank == max(RANKS) else [*TARGETS[0]]
    model = peft_side.load(QUICKSTART / "backbone", torch.float32)
    task = peft_side.PeftTask(model, rank, targets, rate, arguments.steps, rival="packed", head="labelled")
    for batch in steps:
        task.step(batch)
    assert "megatron_mux" not in sys.modules, "importing it would count as time of peft"
    return {"loss": _held_out(task, held_out[0])}


def _held_out(task: Any, pairs: Sequence[Any]) -> float:
    """The mean loss over labelled tokens of held-out records."""
    import torch

    total, labels = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(pairs), 32):
            batch = task.collate(pairs[first : first + 32])
            rows, targets = batch.pop("rows"), batch.pop("targets")
            total += float(task._loss(batch, rows, targets)) * len(targets)
            labels += len(targets)
    return total / labels


def markdown(result: Mapping[str, Any]) -> str:
    """The tables."""
    rows, shares = [], []
    for own in result["seeds"]:
        halving, full = own["halving"], own["none"]
        shares.append(halving["seconds"] / full["seconds"])
        rows.append(
            (
                own["seed"],
                f"{full['seconds']:.0f}",
                f"{halving['seconds']:.0f}",
                f"{shares[-1]:.2f}",
                f"{full['loss']:.4f}",
                f"{halving['loss']:.4f} ({halving['loss'] / full['loss'] - 1:+.1%})",
                f"{own['random']['loss']:.4f} ({own['random']['tried']:.1f} tried)",
                f"{own['worst_quarter']:.0%}",
            )
        )
    what = f"{result['configurations']} configurations of {result['steps']} steps with {result['batch']} sequences each"
    headings = "seed | s, all in full | s, halving | share | best loss in full | by halving | at random | worst quarter"
    shown = f"{what}, {result['held_out']} held-out records."
    text = [measured_on(result), shown, "", *table(headings, rows), ""]
    text.append(f"Median share of time: {statistics.median(shares):.2f}.")
    if "peft" in result:
        whole = result["peft"]["all"]
        times = whole / statistics.median(own["halving"]["seconds"] for own in result["seeds"])
        text.append(
            f"With `peft` one after another: {whole:.0f} s ({MEASURED} measured, multiplied), {times:.1f}x halving."
        )
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
