"""Slow-down of running tasks while another joins with a large file, and its delay until it trains (`--mux-watch`).

    python benchmarks/joining.py --output result.json         # a file of 1,000,000 records: minutes
    python benchmarks/joining.py --unseen-kind --batch 32     # a small file of another kind, under a limit of memory

A task trains on one core with one thread. Then a task file whose data file has a million pairs is put into the watched
directory. While these are tokenised, on any core, the tokenising process is held (SIGSTOP) during every fourth of the
engine's bursts of steps, so that steps with and without it see the same machine; `slower` compares their medians. After
tokenising, the time until the new task's first step is measured.

With `--unseen-kind` what is at work, or held, are the dry runs by which memory is predicted of a kind of adapter that
has not been there before, and the delay counts from the moment at which the task file appears.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from script import QUICKSTART, add_output, command_line, environment, measured_on, publish, table

WORDS = "a the film story acting music plot is was great terrible long short moving dull funny and but with of".split()
HELD = 4
"""The tokenising process is stopped during one of every HELD bursts of steps."""
WARM_UP_STEPS = 12
_UNSEEN = {
    "peft_type": "IA3",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--backbone",
        type=Path,
        help="Hugging Face directory (default: a small random Llama with the quickstart's tokenizer)",
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step of the running task")
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--unseen-kind", action="store_true", help="a task of another kind joins, see above")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    add_output(parser)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.engine is not None:
        return _run_engine(json.loads(arguments.engine.read_text()))
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "joins.jsonl"
        _write_records(data, 2000 if arguments.unseen_kind else arguments.records)
        if arguments.backbone is None:
            arguments.backbone = Path(directory) / "small-llama"
            _make_backbone(arguments.backbone)
        result = environment(arguments.backbone.name, "float32", threads=1)
        result |= {"batch": arguments.batch, "load": os.getloadavg()[0]}
        result |= {"megabytes": round(data.stat().st_size / 1e6, 1), "unseen_kind": arguments.unseen_kind}
        if arguments.unseen_kind:
            result |= measure(arguments, Path(directory) / "slowed", data, _UNSEEN)
            # The delay is that of a run in which nothing is held.
            whole = measure(arguments, Path(directory) / "whole", data, _UNSEEN, held=0)
            result["first_step_after_s"] = whole["first_step_after_s"]
        else:
            result |= measure(arguments, Path(directory) / "run", data)
    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def measure(
    arguments: argparse.Namespace,
    directory: Path,
    data: Path,
    adapter: Mapping[str, Any] | None = None,
    held: int = HELD,
) -> dict[str, Any]:
    """Run the engine once while a task joins.

    Args:
        arguments: The command line.
        directory: A new directory for the run's files.
        data: The data file of the task that joins.
        adapter: Of the task that joins under a limit of memory, whose prediction is observed; None: as the other's.
        held: What is observed is stopped in one of so many bursts of steps; 0: never.
    """
    watched = directory / "watched"
    watched.mkdir(parents=True)
    small = directory / "small.jsonl"
    _write_records(small, 2000)
    (directory / "tasks.yaml").write_text(json.dumps({"tasks": [_task("trains", small, arguments)]}))
    words: list[str | Path] = ["--backbone", arguments.backbone, "--mux-tasks", directory / "tasks.yaml"]
    words += ["--mux-watch", watched, "--mux-data-cache", directory / "tokens", "--mux-no-progress"]
    words += ["--mux-memory-limit", "16GiB"] if adapter is not None else []
    request = {
        "arguments": list(map(str, words)),
        "joins": json.dumps({"tasks": [_task("joins", data, arguments, adapter)]}),
        "held": held,
        "predicted": adapter is not None,
        "watched": str(watched),
        "cache": str(directory / "tokens"),
        "result": str(directory / "result.json"),
    }
    (directory / "request.json").write_text(json.dumps(request))
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--engine", str(directory / "request.json")],
        env={**os.environ, **usual, "MEGATRON_MUX_CACHE": str(directory / "cache")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ran.returncode or not (directory / "result.json").exists():
        raise SystemExit(f"the run failed:\n{ran.stdout}")
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    what = "A task of an unseen kind joins, under a limit of memory"
    if not result["unseen_kind"]:
        what = f"A task with a file of {result['megabytes']} MB joins"
    about = f"{what}; steps of {result['batch']} sequences; load of the machine before: {result['load']:.1f}."
    step = f"{result['held_step_s']:.3f} -> {result['step_s']:.3f} ({result['slower']:+.1%})"
    took = f"{result['tokenised_s']:.0f} s" if "tokenised_s" in result else "-"
    row = (step, result["steps"], took, f"{result['first_step_after_s']:.2f} s")
    headings = (
        "median step of the running task, held -> at work | steps | tokenised in | first step after that"
    )
    return "\n".join([measured_on(result), about, "", *table(headings, [row])])


class _Observer:
    """Observes the engine in its process: records bursts of steps, stops and resumes tokenising or dry runs, ends the
    run.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.bursts: list[dict[str, Any]] = []
        self.child: Any = None
        self.worker: Any = None
        self.work: Any = None
        self.held = self.exited = False
        self.dropped = 0.0
        self._steps = 0

    def before(self) -> None:
        """Called before a burst of steps: add the task that joins, stop or resume the tokenising process."""
        now = time.time()
        if self.child is not None and self.child.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            self.exited = os.waitid(os.P_PID, self.child.pid, options) is not None
        if not self.dropped and self._steps >= WARM_UP_STEPS:
            self.dropped = now
            path = Path(self.request["watched"]) / "joins.yaml"
            path.with_name(".joins").write_text(self.request["joins"])
            path.with_name(".joins").rename(path)
        if self.at_work or self.held:
            every = self.request["held"]
            hold = self.at_work and every > 0 and len(self.bursts) % every == 0
            if hold != self.held:
                number = signal.SIGSTOP if hold else signal.SIGCONT
                if self.request["predicted"]:
                    os.killpg(self.worker.pid, number)
                else:
                    os.kill(self.child.pid, number)
                self.held = hold

    @property
    def at_work(self) -> bool:
        """Whether what is observed is under way."""
        if self.request["predicted"]:
            return self.work is not None and not self.work.done()
        return self.child is not None and self.child.returncode is None

    def after(self, began: float, tasks: Sequence[str], results: Sequence[Any]) -> None:
        """Called after a burst of steps: record it, and end the run when it is complete."""
        now = time.time()
        state = "none" if not self.at_work else "held" if self.held else "at work"
        burst = {"began": began, "seconds": (now - began) / len(results), "steps": len(results)}
        self.bursts.append({**burst, "tasks": list(tasks), "tokenising": state, "exited": self.exited})
        self._steps += len(results)
        if "joins" in tasks:
            os.kill(os.getpid(), signal.SIGTERM)

    def summary(self) -> dict[str, Any]:
        """Summarise the recorded bursts."""
        seconds: dict[str, list[float]] = {"none": [], "held": [], "at work": []}
        for burst in self.bursts[3:]:
            if "joins" not in burst["tasks"]:
                seconds[burst["tokenising"]] += [burst["seconds"]] * burst["steps"]
        held, at_work = (statistics.median(seconds[name] or [float("nan")]) for name in ("held", "at work"))
        found: dict[str, Any] = {
            "held_step_s": held,
            "step_s": at_work,
            "slower": at_work / held - 1,
            "steps": {name: len(values) for name, values in seconds.items()},
        }
        joined = [burst for burst in self.bursts if "joins" in burst["tasks"]]
        if joined and self.request["predicted"]:
            found["first_step_after_s"] = joined[0]["began"] - self.dropped
        elif joined:
            # The last large file of a cache entry; the tokenising process ends soon after.
            done = max(path.stat().st_mtime for path in Path(self.request["cache"]).glob("*/index.bin"))
            found["tokenised_s"] = done - self.dropped
            found["first_step_after_s"] = joined[0]["began"] - done
            without = [burst for burst in self.bursts if "joins" not in burst["tasks"]]
            found["bursts_after_exit"] = sum(burst["exited"] for burst in without)
        return found


def _run_engine(request: Mapping[str, Any]) -> int:
    """Run `pretrain_mux.py` in this process with an observer."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    import pretrain_mux
    from megatron_mux.data.background import BackgroundTokenising
    from megatron_mux.engine import Engine
    from megatron_mux.estimate.run_tables import RunTables
    from megatron_mux.memory import worker

    observer = _Observer(request)
    steps, begin = Engine.steps, BackgroundTokenising.__init__

    def observed_steps(self: Engine, *arguments: Any, **more: Any) -> Any:
        observer.before()
        began, tasks = time.time(), self.active
        results = steps(self, *arguments, **more)
        observer.after(began, tasks, results)
        return results

    def observed_begin(self: BackgroundTokenising, *arguments: Any) -> None:
        begin(self, *arguments)
        observer.child = self._process
        os.sched_setaffinity(self._process.pid, cores)

    start, prepare = worker._Process.__init__, RunTables.prepare

    def observed_start(self: worker._Process, *arguments: Any) -> None:
        start(self, *arguments)
        observer.worker = self._process
        os.sched_setaffinity(self._process.pid, cores)

    def observed_prepare(self: RunTables, *arguments: Any) -> Any:
        observer.work = prepare(self, *arguments)
        return observer.work

    worker._Process.__init__, RunTables.prepare = observed_start, observed_prepare  # type: ignore
    Engine.steps = observed_steps  # type: ignore
    BackgroundTokenising.__init__ = observed_begin  # type: ignore
    status = pretrain_mux.main(request["arguments"])
    if status == 0:
        Path(request["result"]).write_text(json.dumps(observer.summary()))
    return status


def _task(
    name: str, data: Path, arguments: argparse.Namespace, adapter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "adapter": adapter or {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
        "data": {"path": str(data), "max_length": arguments.max_length},
        "training": {"per_device_train_batch_size": arguments.batch, "max_steps": 1_000_000},
    }


def _make_backbone(directory: Path) -> None:
    """Write a Llama of four layers with random weights and the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "backbone", local_files_only=True)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_attention_heads=4, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write_records(path: Path, count: int) -> None:
    chosen = random.Random(count)
    with open(path, "w") as file:
        for i in range(count):
            prompt = " ".join(chosen.choices(WORDS, k=chosen.randint(4, 20)))
            file.write(
                json.dumps({"prompt": f"{i}: {prompt}", "completion": chosen.choice([" good", " bad"])})
                + "\n"
            )


if __name__ == "__main__":
    sys.exit(main())
