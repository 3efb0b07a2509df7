"""Predicted against measured GPU memory, of training with `transformers` + `peft` and with our engine.

python benchmarks/gpu_memory.py predict --output predicted.json                  # no GPU needed: minutes
python benchmarks/gpu_memory.py measure --predicted predicted.json --output measured.json  # on a GPU: ten minutes

`predict` writes the predictions before anything is measured: steps of `transformers.Trainer` are traced, steps of our
engine are dry runs. `measure` runs each case in a process of its own. It compares the peak of the memory that the
allocator reserves, and that of the whole process, and it replays the allocator's history and compares it event by
event. Then it limits the process as if the GPU were smaller: the predicted largest batch has to run, and one more
sequence must not. Goals: reserved memory is predicted within 1% (median) and 3% (worst), every history is replayed
exactly, and predictions of full fine-tuning are better than those of LLMem, DNNMem and Megatron's theoretical report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from script import command_line, publish, table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run by file path, from a checkout

GIB = 1 << 30
GOALS = {"median": 0.01, "worst": 0.03}


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
    if arguments.command == "predict":
        publish(result := predictions(arguments), predicted_table(result), arguments.output)
        return 0
    predicted = json.loads(arguments.predicted.read_text())
    found = measurements(predicted, arguments.only, arguments.output.with_suffix(".partial.json"))
    # Last: it creates a CUDA context, whose memory the measured processes would lack.
    result = {**predicted, **found, "machine": machine_info()}
    publish(result, measured_tables(result), arguments.output)
    return 0


# -- predictions


def predictions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict the memory of every case, and the largest batch within each limit."""
    from gpu_memory_cases import LIMITS, cases, run_specs

    from megatron_mux.gpus import Gpu
    from megatron_mux.memory.batches import Batches
    from megatron_mux.memory.store import versions
    from megatron_mux.memory.trace.tracer import Tracer

    gpu = this_gpu() if arguments.this_gpu else Gpu(arguments.capability, arguments.cudnn_attention)
    chosen = {name: found for name, found in cases(gpu).items() if is_selected(name, arguments.only)}
    with Tracer() as tracer:
        found = {name: predict_case(name, case, tracer) for name, (_, case) in chosen.items()}
        for name, (_, run_spec) in run_specs(gpu).items():
            if is_selected(name, arguments.only):
                found[name] = predict_tasks(name, run_spec)
        limits = []
        for gib, names in LIMITS.items():
            for name in filter(chosen.__contains__, names):
                print(f"largest batch of {name} in {gib} GiB", file=sys.stderr)
                case = chosen[name][1]
                largest = Batches(case, tracer).largest(gib * GIB)
                limits.append({"case": name, "limit": gib * GIB, "largest": largest, "about": asdict(case)})
    predicted_for = {"capability": list(gpu.capability), "prefers_cudnn": gpu.prefers_cudnn}
    return {
        "predicted_with": dict(versions()),
        "predicted_for": predicted_for,
        "cases": found,
        "limits": limits,
    }


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
    from gpu_memory_baselines import baseline_estimates

    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    prediction = prediction_to_json(predict(tracer.step(case), case.gpu))
    return {"asked": {"case": asdict(case)}, **prediction, "others": baseline_estimates(case)}


def predict_tasks(name: str, run_spec: Any) -> dict[str, Any]:
    """Predict the memory of our engine with several tasks, in bytes."""
    from megatron_mux.dry_run.process import dry_runs
    from megatron_mux.memory.caching.settings import Settings
    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    (recording,) = dry_runs([(run_spec, 0)])
    prediction = predict(recording.stream, run_spec.gpu, Settings.of_environment(), recording.communicators)
    return {"asked": {"run_spec": asdict(run_spec)}, **prediction_to_json(prediction), "others": {}}


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


def measurements(predicted: Mapping[str, Any], only: Sequence[str] | None, partial: Path) -> dict[str, Any]:
    """Measure every case and limit, each run in a process of its own; `partial` is updated after each."""
    found: dict[str, Any] = {"cases": {}, "limits": []}

    def save() -> None:
        partial.write_text(json.dumps(found, indent=1) + "\n")

    for name, about in predicted["cases"].items():
        if is_selected(name, only):
            measured = run({**about["asked"], "limit": None, "history": True}, name)
            found["cases"][name] = {**about, "measured": measured}
            save()
    for about in predicted["limits"]:
        if not is_selected(about["case"], only):
            continue
        ran = {}
        for more in (0, 1):
            case = {**about["about"], "batch": about["largest"] + more}
            name = f"{about['case']}, {case['batch']} sequences in {about['limit'] // GIB} GiB"
            asked = {"case": case, "limit": about["limit"], "history": False}
            ran[str(case["batch"])] = run(asked, name) if case["batch"] else {"fits": True}
        found["limits"].append({**about, "measured": ran})
        save()
    return found


def run(asked: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run the worker once; returns what it measured, or the error if it failed other than by running out of memory."""
    print(name, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_memory_worker.py")],
        input=json.dumps(asked) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no error message"]
        return {"failed": lines[-1]}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


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
        "cudnn": cudnn,
        **packages,
    }


# -- tables


def predicted_table(result: Mapping[str, Any]) -> str:
    """Render the predictions."""
    rows = [
        (name, f"{one['peak_allocated'] / GIB:.3f}", f"{one['peak_reserved'] / GIB:.3f}", one["moment"])
        for name, one in result["cases"].items()
    ]
    lines = [*table("case | allocated (GiB) | reserved (GiB) | moment of the peak", rows), ""]
    limits = [(one["case"], one["limit"] // GIB, one["largest"]) for one in result["limits"]]
    versions = ", ".join(f"{name} {number}" for name, number in result["predicted_with"].items())
    lines += table("case | limit (GiB) | largest batch", limits)
    return "\n".join(
        [f"Predicted with {versions}, for {result['predicted_for']}. Nothing is measured.", "", *lines]
    )


def error(predicted: float, measured: float) -> float:
    """Relative error with its sign."""
    return predicted / measured - 1


def measured_tables(result: Mapping[str, Any]) -> str:
    """Render predictions next to measurements, and compare the errors with the goals."""
    rows, errors = [], []
    baselines: dict[str, list[float]] = {}
    our_errors: dict[str, list[float]] = {}
    exact = 0
    for name, one in result["cases"].items():
        measured = one["measured"]
        if "failed" in measured or not measured["fits"]:
            rows.append(
                (
                    name,
                    f"{one['peak_reserved'] / GIB:.3f}",
                    measured.get("failed") or measured["why"],
                    "",
                    "",
                    "",
                )
            )
            continue
        reserved = measured["peak_reserved"]
        errors.append(off := error(one["peak_reserved"], reserved))
        replayed = "replay_failed" not in measured and measured["first_event_replayed_otherwise"] is None
        exact += replayed
        process = reserved + measured["outside"]
        for baseline, estimate in one["others"].items():
            baselines.setdefault(baseline, []).append(error(estimate, process))
            our_errors.setdefault(baseline, []).append(error(one["process"], process))
        rows.append(
            (
                name,
                f"{one['peak_reserved'] / GIB:.3f}",
                f"{reserved / GIB:.3f}",
                f"{off:+.2%}",
                f"{error(one['peak_allocated'], measured['peak_allocated']):+.2%}",
                "yes"
                if replayed
                else measured.get("replay_failed")
                or f"not event {measured['first_event_replayed_otherwise']}",
            )
        )
    head = ", ".join(f"{name} {number}" for name, number in result["machine"].items())
    titles = "case | reserved, predicted (GiB) | measured (GiB) | error | error of allocated | history replayed exactly"
    lines = [f"Measured on: {head}.", "", *table(titles, rows), ""]
    if errors:
        sizes = sorted(map(abs, errors))
        lines.append(
            f"Error of reserved memory: median {statistics.median(sizes):.2%} (goal {GOALS['median']:.0%}), "
            f"worst {sizes[-1]:.2%} (goal {GOALS['worst']:.0%}) of {len(sizes)} cases; "
            f"{exact} histories replayed exactly."
        )
    for baseline, found in baselines.items():
        ours = statistics.median(map(abs, our_errors[baseline]))
        lines.append(
            f"Memory of the process in the {len(found)} cases that {baseline} supports: its median error is "
            f"{statistics.median(map(abs, found)):.1%}, ours {ours:.1%}."
        )
    return "\n".join([*lines, "", *limit_table(result["limits"])])


def limit_table(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render whether the predicted largest batch runs, and one more sequence."""
    rows = []
    for one in limits:
        least, most = (one["measured"][str(one["largest"] + more)] for more in (0, 1))
        outcomes = [ran.get("failed") or ("runs" if ran["fits"] else "does not fit") for ran in (least, most)]
        rows.append((one["case"], one["limit"] // GIB, one["largest"], *outcomes))
    return table("case | limit (GiB) | predicted largest batch | this batch | one more", rows)


if __name__ == "__main__":
    sys.exit(main())
