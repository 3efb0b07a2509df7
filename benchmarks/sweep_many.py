"""What a sweep of many configurations costs beside its steps: seconds a decision, memory, descriptors and files.

    python benchmarks/sweep_many.py --output benchmarks/results/sweep-many-cpu-2-cores.json      # ten minutes

A random model of two layers with the quickstart's tokenizer and data; configurations (rank, learning rate) are drawn at
random and halved from the first step on. Each number of configurations is a process of its own; the smallest runs once
more with larger ranks under a limit of memory, so that configurations wait and take room that becomes free. Three parts
of a decision are timed: deciding (comparing; writing `results.csv`, `curves.svg` and the log), following (those that
stop are saved and leave memory, others go on from their save), and taking in those that wait.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from script import QUICKSTART, add_output, command_line, environment, measured_on, publish, table

LIMIT = "48MiB"
"""Room for some fifteen of the configurations at a time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--configurations", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--steps", type=int, default=27, help="of each configuration in full")
    parser.add_argument("--memory-limit", default=LIMIT, help="of the last run, whose configurations wait")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=3, metavar=("TASKS", "DIRECTORY", "LIMIT"), help=argparse.SUPPRESS)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        tasks, directory, limit = arguments.worker
        print(json.dumps(_measure(Path(tasks), Path(directory), limit)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _write_backbone(Path(folder) / "backbone")
        runs = [_run(count, "", arguments, Path(folder)) for count in arguments.configurations]
        runs.append(_run(min(arguments.configurations), arguments.memory_limit, arguments, Path(folder)))
    result = environment("two random layers of width 64", "float32", arguments.threads) | {"runs": runs}
    publish(result, markdown(result), arguments.output)
    return 0


def _write_backbone(directory: Path) -> None:
    """A random Llama of two layers with the quickstart's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(QUICKSTART / "backbone")
    tokenizer.save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def _run(count: int, limit: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A sweep of so many configurations in a process of its own, with a limit of memory unless it is empty."""
    lines = (QUICKSTART / "data" / "movie.eval.jsonl").read_text().splitlines()[:16]
    (folder / "held-out.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "name": "movie",
        "adapter": {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]},
        "data": {"path": str(QUICKSTART / "data" / "movie.jsonl"), "max_length": 64},
        "training": {"per_device_train_batch_size": 2, "max_steps": arguments.steps},
        "eval": {"path": "held-out.jsonl", "metrics": []},
        "sweep": {
            # Under a limit larger ones: activations are divided into micro-batches, only adapters make others wait.
            "adapter.r": [128, 256] if limit else [2, 4, 8, 16],
            "training.learning_rate": {"log_uniform": [1e-4, 1e-1]},
            "samples": count,
        },
    }
    tasks = folder / f"{count}-{limit or 'unlimited'}.yaml"
    tasks.write_text(yaml.safe_dump({"scheduler": {"type": "halving", "min_steps": 1}, "tasks": [task]}))
    directory = folder / f"{count}-{limit or 'unlimited'}"
    done = subprocess.run(
        [sys.executable, __file__, "--worker", str(tasks), str(directory), limit],
        env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1", "COLUMNS": "80"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"configurations": count, "limit": limit, **found}


def _measure(tasks: Path, directory: Path, limit: str) -> dict[str, Any]:
    """Run it here; what decisions took, and what the process and its files came to."""
    from megatron_mux.training.callbacks.sweeps import Sweeps
    from megatron_mux.training.task_registry import TaskRegistry
    from pretrain_mux import main as train

    deciding, following = _timed(Sweeps, "poll"), _timed(TaskRegistry, "follow")
    admitting = _timed(TaskRegistry, "admit")
    polled, descriptors = Sweeps.poll, [0]

    def poll(self: Sweeps) -> Any:
        descriptors.append(len(os.listdir("/proc/self/fd")))
        return polled(self)

    Sweeps.poll = poll  # type: ignore[method-assign]
    printed, began = io.StringIO(), time.perf_counter()
    words = ["--backbone", tasks.parent / "backbone", "--mux-tasks", tasks, "--save", directory, "--mux-fp32"]
    limits = ["--mux-memory-limit", limit] if limit else []
    with contextlib.redirect_stdout(printed):
        status = train([*map(str, words), "--mux-no-progress", *limits])
    seconds = time.perf_counter() - began
    assert status == 0, printed.getvalue()
    text = printed.getvalue()
    board = text[text.index("configurations, best first") : text.index("\nbest: ")].splitlines()
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {
        "seconds": seconds,
        "deciding": deciding,
        "following": following,
        "admitting": admitting,
        "waited": text.count("waits until there is room"),
        "decisions": len((directory / "sweep.jsonl").read_text().splitlines()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "descriptors": max(descriptors),
        "files": len(files),
        "file_bytes": sum(path.stat().st_size for path in files),
        "leaderboard_columns": max(map(len, board)),
        "leaderboard": board,
    }


def _timed(kind: type, method: str) -> list[float]:
    """Have a method note the seconds of each of its calls; returns the list of them."""
    original, seconds = getattr(kind, method), []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(kind, method, timed)
    return seconds


def markdown(result: Mapping[str, Any]) -> str:
    """The table."""
    parts = ("deciding", "following", "admitting")
    rows = [
        (
            own["configurations"],
            own["limit"] or "none",
            own["waited"],
            f"{own['seconds']:.0f}",
            own["decisions"],
            *(f"{sum(own[part]) / own['decisions'] * 1000:.1f}" for part in parts),
            f"{sum(map(sum, (own[part] for part in parts))) / own['seconds']:.0%}",
            f"{own['peak_bytes'] / 2**30:.2f}",
            own["descriptors"],
            own["files"],
            f"{own['file_bytes'] / 2**20:.0f}",
            own["leaderboard_columns"],
        )
        for own in result["runs"]
    ]
    headings = (
        "configurations | limit of memory | waited | s | decisions | ms a decision: deciding | following | taking in | "
        "share of the run | peak GiB | descriptors | files | MiB of files | columns of the leaderboard"
    )
    return "\n".join([measured_on(result), "", *table(headings, rows)])


if __name__ == "__main__":
    sys.exit(main())
