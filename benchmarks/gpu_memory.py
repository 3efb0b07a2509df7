"""Predicted against measured GPU memory, of training with `transformers` + `peft` and with our engine.

python benchmarks/gpu_memory.py predict --output predicted.json            # no GPU needed: three minutes
python benchmarks/gpu_memory.py measure --predicted predicted.json --output measured.json            # on a GPU

Both keep each result at once (in `OUTPUT.partial.json`), and go on from there when they are called again; `--minutes`
bounds the time of a call.

`predict` writes the predictions before anything is measured: steps of `transformers.Trainer` are traced, steps of our
engine are dry runs. `measure` runs each case in a process of its own. It compares the peak of the memory that the
allocator reserves, and that of the whole process, and it replays the allocator's history and compares it event by
event. Then it limits the process as if the GPU were smaller: the predicted largest batch has to run, and one more
sequence must not. Goals: reserved memory is predicted within 1% (median) and 3% (worst), every history is replayed
exactly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_memory_tables import measured_tables, predicted_table
from script import command_line, publish
from sitting import Kept, Sitting, tell_left

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run by file path, from a checkout

GIB = 1 << 30
CASE_SECONDS = 60
"""A measured case is stopped when it takes longer; it begins only if there is as much time."""
PREDICTION_SECONDS = 90
"""A prediction begins only if there is as much time."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("command", choices=("predict", "measure"), help="write predictions, or measure and compare")
    add("--predicted", type=Path, metavar="FILE", help="for measure: the file that predict has written")
    add("--only", nargs="+", metavar="WORD", help="only cases whose name contains one of these words")
    add(
        "--capability",
        type=capability,
        default=(9, 0),
        metavar="X.Y",
        help="for predict: the GPU's compute capability (9.0)",
    )
    add("--cudnn-attention", action=argparse.BooleanOptionalAction, default=True,
        help="for predict: whether torch prefers cuDNN for attention (see `Gpu`; default: yes)")  # fmt: skip
    add(
        "--this-gpu",
        action="store_true",
        help="for predict: read both from this machine's GPU, which is not used otherwise",
    )
    add("--minutes", type=float, metavar="M", help="of this call (no limit)")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the JSON; tables are written beside it as .md",
    )
    arguments = parser.parse_args(argv)
    if (arguments.command == "measure") != (arguments.predicted is not None):
        parser.error("measure needs --predicted FILE, and predict does not take it")
    return arguments


def capability(text: str) -> tuple[int, int]:
    """Parse a compute capability such as `9.0`."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, or measure and compare."""
    arguments = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    kept_in, sitting = arguments.output.with_suffix(".partial.json"), Sitting(arguments.minutes)
    if arguments.command == "predict":
        publish(result := predictions(arguments, kept_in, sitting), predicted_table(result), arguments.output)
        return 0
    predicted = json.loads(arguments.predicted.read_text())
    try:
        found = measurements(predicted, arguments.only, kept_in, sitting)
    finally:
        _WORKERS.end()
    # Last: it creates a CUDA context, whose memory the measured processes would lack.
    result = {**predicted, **found, "machine": machine_info()}
    publish(result, measured_tables(result), arguments.output)
    return 0


Job = tuple[int, float, Callable[[], bool], Callable[[], None]]
"""When it is done, its seconds at most, whether it is kept already, and what adds its result to those kept."""


def run_jobs(jobs: Sequence[Job], kept: Kept, sitting: Sitting) -> None:
    """Do the jobs that are not kept, in their turns, as far as time allows; each result is kept at once."""
    left = [job for job in sorted(jobs, key=lambda job: job[0]) if not job[2]()]
    while left and sitting.has_time(left[0][1]):
        left.pop(0)[3]()
        kept.keep()
    tell_left(len(left), len(jobs))


# -- predictions


def predictions(arguments: argparse.Namespace, kept_in: Path, sitting: Sitting) -> dict[str, Any]:
    """Predict the memory of every case, and the largest batch within each limit; `kept_in` is updated after each."""
    from gpu_memory_cases import LIMITS, cases, run_specs

    from megatron_mux.gpus import Gpu
    from megatron_mux.memory.batches import Batches
    from megatron_mux.memory.store import versions
    from megatron_mux.memory.trace.tracer import Tracer

    gpu = this_gpu() if arguments.this_gpu else Gpu(arguments.capability, arguments.cudnn_attention)
    predicted_for = {"capability": list(gpu.capability), "prefers_cudnn": gpu.prefers_cudnn}
    about = {"predicted_with": dict(versions()), "predicted_for": predicted_for}
    kept = Kept(kept_in, about, {"cases": {}, "limits": []})
    found, limits = kept.found["cases"], kept.found["limits"]
    chosen = {name: case for name, (_, case) in cases(gpu).items() if is_selected(name, arguments.only)}
    ours = {name: run for name, (_, run) in run_specs(gpu).items() if is_selected(name, arguments.only)}
    with Tracer() as tracer:

        def add_limit(name: str, limit: int) -> None:
            print(f"largest batch of {name} in {limit // GIB} GiB", file=sys.stderr)
            largest = Batches(chosen[name], tracer).largest(limit)
            limits.append({"case": name, "limit": limit, "largest": largest, "about": asdict(chosen[name])})

        def job(name: str, predict: Callable[[], dict[str, Any]]) -> Job:
            return 0, PREDICTION_SECONDS, lambda: name in found, lambda: found.update({name: predict()})

        jobs = [job(name, partial(predict_case, name, case, tracer)) for name, case in chosen.items()]
        jobs += [job(name, partial(predict_tasks, name, run)) for name, run in ours.items()]
        for limit, name in [(gib * GIB, name) for gib, names in LIMITS.items() for name in names]:
            if name in chosen:
                known = partial(is_limit_kept, limits, name, limit)
                jobs.append((1, PREDICTION_SECONDS, known, partial(add_limit, name, limit)))
        run_jobs(jobs, kept, sitting)
    return {
        **about,
        "cases": {name: found[name] for name in (*chosen, *ours) if name in found},
        "limits": limits,
    }


def is_limit_kept(limits: Sequence[Mapping[str, Any]], name: str, limit: int) -> bool:
    """Whether a limit of a case is among those kept."""
    return any((one["case"], one["limit"]) == (name, limit) for one in limits)


def this_gpu() -> Any:
    """Read the properties of this machine's GPU on which the choice of kernels depends."""
    import torch

    from megatron_mux.gpus import Gpu

    found = torch.cuda.get_device_capability()
    # torch's rule: see `Gpu`.
    cudnn = found in ((9, 0), (10, 0)) and (torch.backends.cudnn.version() or 0) >= 91501
    return Gpu(found, cudnn)


def predict_case(name: str, case: Any, tracer: Any) -> dict[str, Any]:
    """Predict the memory of training with `transformers`, in bytes."""
    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    return {"asked": {"case": asdict(case)}, **prediction_to_json(predict(tracer.step(case), case.gpu))}


def predict_tasks(name: str, run_spec: Any) -> dict[str, Any]:
    """Predict the memory of our engine with several tasks, in bytes."""
    from megatron_mux.dry_run.process import dry_runs
    from megatron_mux.memory.caching.settings import Settings
    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    (recording,) = dry_runs([(run_spec, 0)])
    prediction = predict(recording.stream, run_spec.gpu, Settings.of_run(), recording.communicators)
    return {"asked": {"run_spec": asdict(run_spec)}, **prediction_to_json(prediction)}


def prediction_to_json(prediction: Any) -> dict[str, Any]:
    """Convert a prediction to JSON; sizes are in bytes."""
    return {
        "peak_allocated": prediction.peak_allocated,
        "peak_reserved": prediction.peak_reserved,
        "process": prediction.process,
        "interval": list(prediction.interval),
        "moment": prediction.moment,
    }


# -- measurements


def measurements(
    predicted: Mapping[str, Any], only: Sequence[str] | None, kept_in: Path, sitting: Sitting
) -> dict[str, Any]:
    """Measure every case and limit, each run in a process of its own; `kept_in` is updated after each."""
    from gpu_memory_cases import turn_of

    from megatron_mux.memory.store import versions

    digest = hashlib.sha256(json.dumps(predicted, sort_keys=True).encode()).hexdigest()
    kept = Kept(kept_in, {"predictions": digest, "versions": dict(versions())}, {"cases": {}, "limits": []})
    found, limits = kept.found["cases"], kept.found["limits"]

    def add_case(name: str) -> None:
        about = predicted["cases"][name]
        measured = run({**about["asked"], "limit": None, "history": True}, name)
        found[name] = {**about, "measured": measured}

    def add_limit(about: Mapping[str, Any]) -> None:
        limits.append(
            {**about, "measured": {str(batch): run_limited(about, batch) for batch in batches(about)}}
        )

    jobs: list[Job] = [
        (turn_of(name), CASE_SECONDS, partial(found.__contains__, name), partial(add_case, name))
        for name in predicted["cases"]
        if is_selected(name, only)
    ]
    for about in predicted["limits"]:
        name, limit = about["case"], about["limit"]
        if is_selected(name, only):
            known = partial(is_limit_kept, limits, name, limit)
            jobs.append((turn_of(name, True), 2 * CASE_SECONDS, known, partial(add_limit, about)))
    run_jobs(jobs, kept, sitting)
    return {"cases": found, "limits": limits}


def batches(about: Mapping[str, Any]) -> tuple[int, int]:
    """The largest batch that was predicted to fit, and one more sequence."""
    return about["largest"], about["largest"] + 1


def run_limited(about: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Run a case with so many sequences as if the GPU were smaller."""
    if batch == 0:
        return {"fits": True}
    name = f"{about['case']}, {batch} sequences in {about['limit'] // GIB} GiB"
    return run({"case": {**about["about"], "batch": batch}, "limit": about["limit"], "history": False}, name)


def run(asked: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run the worker once; returns what it measured, or the error if it failed other than by running out of memory."""

    print(name, file=sys.stderr)
    process = _WORKERS.take(ours="run_spec" in asked)
    try:
        output, errors = process.communicate(json.dumps(asked) + "\n", timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"took more than {CASE_SECONDS} s"}
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no error message"]
        return {"failed": lines[-1]}
    return json.loads(output)  # type: ignore[no-any-return]


class _Workers:
    """Processes of `gpu_memory_worker.py` that import while others measure, and wait for what they are asked.

    None touches the GPU before, so that they do not add to what is measured.
    """

    def __init__(self, ahead: int = 3) -> None:
        self._ahead = ahead
        self._waiting: dict[bool, list[subprocess.Popen[str]]] = {True: [], False: []}

    def take(self, ours: bool) -> subprocess.Popen[str]:
        """The process that has waited longest; others start beside it.

        Args:
            ours: Whether it trains with our engine, whose allocator has our options.
        """
        waiting = self._waiting[ours]
        while len(waiting) <= self._ahead:
            waiting.append(self._start(ours))
        return waiting.pop(0)

    def end(self) -> None:
        """End those that wait."""
        for waiting in self._waiting.values():
            for process in waiting:
                process.kill()
                process.communicate()
            waiting.clear()

    def _start(self, ours: bool) -> subprocess.Popen[str]:
        from megatron_mux.gpus import set_allocator_options

        environment = dict(os.environ)
        if ours:
            set_allocator_options(environment)  # as `pretrain_mux.py` does
        return subprocess.Popen(
            [sys.executable, str(HERE / "gpu_memory_worker.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


_WORKERS = _Workers()


def is_selected(name: str, only: Sequence[str] | None) -> bool:
    """Whether `--only` selects a case."""
    return only is None or any(word in name for word in only)


def machine_info() -> dict[str, str]:
    """Describe the GPU and the versions."""
    from importlib.metadata import version

    import torch

    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    cudnn = str(torch.backends.cudnn.version())
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cudnn": cudnn,
        **packages,
    }


if __name__ == "__main__":
    sys.exit(main())
