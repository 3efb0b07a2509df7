"""What users train, on a GPU against a CPU: losses of eight steps of `pretrain_mux.py` in 17 cases, side by side.

    python benchmarks/gpu_cases.py --data .quickstart --output cases.json           # on the GPU and on the CPU
    python benchmarks/gpu_cases.py --data DATA --output DATA/cases.json --devices cpu --seconds 3600

All kinds of adapters, optimizers, preference losses, quantised backbones, experts, evaluation, rows of their own,
offloaded weights, recomputation, chunks and TF32, on small models with random weights, with a real tokenizer and data.
The CPU computes in fp32 what the GPU computes in bf16, on weights that are quantised alike. The largest relative
difference of a loss is held against a bound for the case's precision. The CPU takes minutes for each case: the second
command computes its losses beforehand, on any machine; the first one then compares with them. Libraries are imported
once, and each case is a fork.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_case_list import Case, cases
from script import ROOT, command_line, table

from megatron_mux.files import write_atomically

DEVICES = ("cuda", "cpu")
BOUNDS = {"fp32": 1e-5, "tf32": 5e-3, "half": 2e-2}
"""Largest relative difference of a loss from the CPU's in fp32, by the GPU's precision."""
_OF_CPU = {"--bf16": ("--mux-fp32",), "--mux-tf32": ()}
"""Flags of a case on the CPU in place of others: it is the reference, and few CPUs multiply in bf16."""
_IMPORTED = (
    "torch",
    "transformers",
    "peft",
    "megatron.core",
    "megatron_mux.engine",
    "megatron_mux.training.run",
)
_TAIL = 3000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="directory with backbone/tokenizer*.json and data/*.jsonl")
    add("--output", type=Path, required=True, help="JSON, and .md beside it; a case in it is not run again")
    add("--known", type=Path, help="output of another run, whose cases are not run again (DATA/cases.json)")
    add("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    add("--only", nargs="+", metavar="NAME", help="only these cases")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="cases side by side")
    add("--seconds", type=float, default=150, help="of all cases: those that still run then are ended")
    add("--scratch", type=Path, help="directory for models and runs (default: a temporary directory)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left, print the comparison; returns 1 if a case fails or is further off than its bound."""
    arguments = parse(argv)
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (arguments.scratch or Path(temporary)).resolve()
        chosen = [case for case in cases(scratch) if not arguments.only or case.name in arguments.only]
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        add_known(kept, arguments.known or arguments.data / "cases.json")
        left = [
            (case, device)
            for device in arguments.devices
            for case in chosen
            if case.name not in kept.get(device, {})
        ]
        if left:
            _import_without_cuda()
            write_models(scratch, arguments.data)
            run_all(left, scratch, arguments.jobs, end, kept, arguments.output)
    lines, fine = compared(chosen, kept)
    text = "\n".join(lines)
    arguments.output.with_suffix(".md").write_text(text + "\n")
    print(text)
    return 0 if fine else 1


def add_known(kept: dict[str, dict[str, Any]], file: Path) -> None:
    """Add cases that ran in another run, such as the CPU's, computed on another machine beforehand.

    Args:
        kept: By device and name; its own cases stay.
        file: The other run's output; may be missing.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    for device, found in known.items():
        own = kept.setdefault(device, {})
        own |= {name: one for name, one in found.items() if name not in own and one["status"] == 0}


def _import_without_cuda() -> None:
    """Import what all cases need, without a call of CUDA's runtime, after which forks could not use it."""
    from megatron_mux.gpus import set_allocator_options

    set_allocator_options()
    os.environ |= {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in _IMPORTED:
        __import__(name)


def write_models(scratch: Path, data: Path) -> None:
    """Write a Llama and a Mixtral with random weights, and the records of preferences."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    inside = scratch / "in"
    if inside.exists():
        return
    sizes: dict[str, Any] = {"vocab_size": 49152, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes["max_position_embeddings"] = 2048
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    llama = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
    }
    mixtral = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, **experts}
    made: dict[str, Any] = {
        "llama": (LlamaForCausalLM, LlamaConfig(**sizes, **llama)),
        "mixtral": (MixtralForCausalLM, MixtralConfig(**sizes, **mixtral)),
    }
    for name, (kind, config) in made.items():
        with torch.device("meta"):
            model = kind(config)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                wide = 0.02 if parameter.shape[0] == config.vocab_size else 0.04
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(
                    0, wide, generator=generator
                )
        model.tie_weights()
        model.save_pretrained(scratch / name)
        for file in (data / "backbone").glob("tokenizer*.json"):
            shutil.copy(file, scratch / name / file.name)
    part = inside.with_suffix(".part")
    shutil.copytree(data / "data", part, dirs_exist_ok=True)
    other = {" positive": " negative", " negative": " positive"}
    records = [json.loads(line) for line in (part / "movie.jsonl").read_text().splitlines()[:200]]
    pairs = [
        {
            "prompt": one["prompt"],
            "chosen": one["completion"],
            "rejected": other.get(one["completion"], " no"),
        }
        for one in records
    ]
    (part / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    part.rename(inside)


def run_all(
    left: Sequence[tuple[Case, str]],
    scratch: Path,
    jobs: int,
    end: float,
    kept: dict[str, dict[str, Any]],
    output: Path,
) -> None:
    """Run cases side by side, each a fork; each result is kept as it comes.

    Args:
        left: Cases and devices.
        scratch: With the models.
        jobs: Cases at once.
        end: By the monotonic clock: what still runs then is ended.
        kept: By device and name; takes the results.
        output: Takes `kept`.
    """
    waiting, running = list(left), dict[int, tuple[Case, str, float]]()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < end:
            case, device = waiting.pop(0)
            running[_fork(case, device, scratch, threads)] = case, device, time.monotonic()
        if not running:
            return
        if time.monotonic() >= end:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
        pid, status = os.waitpid(-1, 0 if time.monotonic() >= end else os.WNOHANG)
        if pid not in running:
            time.sleep(0.1)
            continue
        case, device, start = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        found = {"status": code, "seconds": time.monotonic() - start, **results_of(case, device, scratch)}
        if code:
            found["output"] = (_place(scratch, case, device) / "log").read_text()[-_TAIL:]
        kept.setdefault(device, {})[case.name] = found
        write_atomically(output, json.dumps(kept, indent=1) + "\n")
        print(f"{device} {case.name}: status {code}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)


def _place(scratch: Path, case: Case, device: str) -> Path:
    return scratch / "runs" / device / case.name


def _fork(case: Case, device: str, scratch: Path, threads: int) -> int:
    """Start a case in a process group of its own; returns its process id."""
    import torch

    place = _place(scratch, case, device)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "tasks.yaml").write_text(json.dumps({"tasks": case.tasks}))
    words = ["--backbone", str(scratch / case.model), "--mux-tasks", str(place / "tasks.yaml")]
    other = _OF_CPU if device == "cpu" else {}
    flags = [own for flag in case.flags for own in other.get(flag, (flag,))]
    words += ["--save", str(place / "out"), "--mux-no-progress", "--log-interval", "1", *flags]
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["MEGATRON_MUX_CACHE"] = str(place / "cache")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        if torch.cuda._is_in_bad_fork():  # some import has called CUDA's runtime: import again
            os.execv(sys.executable, [sys.executable, str(ROOT / "pretrain_mux.py"), *words])
        torch.set_num_threads(threads)
        import pretrain_mux

        code = pretrain_mux.main(words)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def results_of(case: Case, device: str, scratch: Path) -> dict[str, Any]:
    """Losses by task and step, and evaluation losses by task, of a case that has run."""
    losses, evaluated = {}, {}
    for task in case.tasks:
        file = _place(scratch, case, device) / "out" / task["name"] / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        losses[task["name"]] = [line["loss"] for line in lines if "loss" in line]
        evaluated[task["name"]] = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return {"losses": losses, "eval_losses": evaluated}


def difference(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> float:
    """Largest relative difference of a loss; infinite if steps are missing."""
    worst = 0.0
    for task, theirs in other.items():
        ours = one.get(task, ())
        if len(ours) != len(theirs):
            return float("inf")
        worst = max([worst, *(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True))])
    return worst


def compared(chosen: Sequence[Case], kept: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    """A table of all cases, and whether all ran and are within their bounds."""
    rows, fine = [], True
    for case in chosen:
        cells: list[str] = []
        found = {device: kept.get(device, {}).get(case.name) for device in DEVICES}
        for one in found.values():
            cells.append("-" if one is None else f"{one['seconds']:.0f} s" if not one["status"] else "failed")
            fine &= one is None or one["status"] == 0
        apart = None
        if found["cuda"] is not None and found["cpu"] is not None:
            apart = max(
                difference(found["cuda"][kind], found["cpu"][kind]) for kind in ("losses", "eval_losses")
            )
            fine &= apart <= BOUNDS[case.precision]
        lengths = {len(own) for one in found.values() if one for own in one["losses"].values()}
        rows.append(
            (case.name, *cells, "/".join(map(str, sorted(lengths))), _number(apart), BOUNDS[case.precision])
        )
    headings = "case | on the GPU | on the CPU | steps | largest relative difference of a loss | bound"
    return table(headings, rows), fine


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
