"""Predicted against measured GPU memory: `transformers` + `peft` training, and our engine's; a process for each run.

python benchmarks/gpu_memory.py predict --output predicted.json                  # no GPU needed: minutes
python benchmarks/gpu_memory.py measure --predicted predicted.json --output measured.json  # on a GPU: ten minutes

Predictions are written down first, and `measure` changes none: traces of `transformers.Trainer`'s steps, dry runs of
our engine's. Measured is what the allocator reserves at its peak, and what the process takes beside it; each run's
allocator history is replayed and compared event by event. Then the
process is limited as if the GPU were smaller: the predicted largest batch has to run, and one more must not.
Goals: reserved memory predicted within 1% (median) and 3% (worst); every history replayed exactly; LLMem, DNNMem and
Megatron's theoretical report beaten on what they know: full fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
    add("what", choices=("predict", "measure"), help="write predictions down, or measure and compare")
    add("--predicted", type=Path, metavar="FILE", help="for measure: what predict has left")
    add("--only", nargs="+", metavar="WORD", help="only cases whose name has one of these words")
    add(
        "--capability",
        type=capability,
        default=(9, 0),
        metavar="X.Y",
        help="for predict: the GPU's compute capability (9.0)",
    )
    add("--cudnn-attention", action=argparse.BooleanOptionalAction, default=True,
        help="for predict: whether torch finds a cuDNN that it prefers for attention (see `Gpu`)")  # fmt: skip
    add(
        "--this-gpu",
        action="store_true",
        help="for predict: for the GPU at hand instead (nothing is put on it)",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="the JSON; the table is left beside it")
    arguments = parser.parse_args(argv)
    if (arguments.what == "measure") != (arguments.predicted is not None):
        parser.error("--predicted FILE belongs to measure, and measure needs it")
    return arguments


def capability(text: str) -> tuple[int, int]:
    """A compute capability such as `9.0`."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, or measure and compare."""
    arguments = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.what == "predict":
        publish(result := predictions(arguments), predicted_table(result), arguments.output)
        return 0
    predicted = json.loads(arguments.predicted.read_text())
    found = measurements(predicted, arguments.only, arguments.output.with_suffix(".partial.json"))
    # Last, for it has a CUDA context, whose memory measured processes would miss.
    result = {**predicted, **found, "machine": machine()}
    publish(result, measured_tables(result), arguments.output)
    return 0


# -- before


def predictions(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is predicted of every case, and which batches are expected to be the largest."""
    from gpu_memory_cases import LIMITS, cases, settings

    from megatron_mux.gpus import Gpu
    from megatron_mux.memory.batches import Batches
    from megatron_mux.memory.store import versions
    from megatron_mux.memory.trace.tracer import Tracer

    gpu = this_gpu() if arguments.this_gpu else Gpu(arguments.capability, arguments.cudnn_attention)
    chosen = {name: found for name, found in cases(gpu).items() if wanted(name, arguments.only)}
    with Tracer() as tracer:
        found = {name: predicted_case(name, case, tracer) for name, (_, case) in chosen.items()}
        for name, (_, run_spec) in settings(gpu).items():
            if wanted(name, arguments.only):
                found[name] = predicted_together(name, run_spec)
        limits = []
        for gib, names in LIMITS.items():
            for name in filter(chosen.__contains__, names):
                print(f"largest batch of {name} in {gib} GiB", file=sys.stderr)
                case = chosen[name][1]
                largest = Batches(case, tracer).largest(gib * GIB)
                limits.append({"case": name, "limit": gib * GIB, "largest": largest, "about": asdict(case)})
    gpu_words = {"capability": list(gpu.capability), "prefers_cudnn": gpu.prefers_cudnn}
    return {
        "predicted_with": dict(versions()),
        "predicted_for": gpu_words,
        "cases": found,
        "limits": limits,
    }


def this_gpu() -> Any:
    """What of the GPU at hand decides which kernels run."""
    import torch

    from megatron_mux.gpus import Gpu

    found = torch.cuda.get_device_capability()
    # torch's rule: see `Gpu`.
    cudnn = found in ((9, 0), (10, 0)) and (torch.backends.cudnn.version() or 0) >= 91501
    return Gpu(found, cudnn)


def predicted_case(name: str, case: Any, tracer: Any) -> dict[str, Any]:
    """What is predicted of one case, in bytes."""
    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    found = predict(tracer.step(case), case.gpu)
    return {"asked": {"case": asdict(case)}, **told(found), "others": others(case)}


def predicted_together(name: str, run_spec: Any) -> dict[str, Any]:
    """What is predicted of our engine with several tasks, in bytes."""
    from megatron_mux.dry_run.process import dry_runs
    from megatron_mux.memory.caching.settings import Settings
    from megatron_mux.memory.estimate import predict

    print(name, file=sys.stderr)
    (recording,) = dry_runs([(run_spec, 0)])
    found = predict(recording.stream, run_spec.gpu, Settings.of_environment(), recording.communicators)
    return {"asked": {"run_spec": asdict(run_spec)}, **told(found), "others": {}}


def told(found: Any) -> dict[str, Any]:
    """A prediction as it is written down."""
    return {
        "peak_allocated": found.peak_allocated,
        "peak_reserved": found.peak_reserved,
        "process": found.process,
        "interval": list(found.interval),
        "moment": found.moment,
    }


def others(case: Any) -> dict[str, int]:
    """What LLMem, DNNMem and Megatron's report say of full fine-tuning; nothing of what they do not know."""
    from benchmarks.papers.decision import layouts
    from benchmarks.papers.dnnmem import DNNMem
    from benchmarks.papers.llmem import LLMem
    from megatron_mux.errors import UserError

    if case.adapter is not None:
        return {}
    skeleton = skeleton_of(case.config)
    ask: dict[str, Callable[[], float]] = {
        "LLMem": lambda: sum(
            LLMem(skeleton.tensors, case.length).breakdown(layouts(1)[0], case.batch).values()
        ),
        "DNNMem": lambda: sum(DNNMem(skeleton, case.length).breakdown(case.batch).values()),
        "Megatron's report": lambda: megatron_report(case, skeleton),
    }
    found = {}
    for name, answer in ask.items():
        try:
            found[name] = int(answer())
        except (UserError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def skeleton_of(config: Mapping[str, Any]) -> Any:
    """What a config.json tells of a model's tensors."""
    import tempfile

    from megatron_mux.memory.tensors import Skeleton

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        skeleton = Skeleton(path)
        _ = skeleton.tensors  # while the file is there
        return skeleton


def megatron_report(case: Any, skeleton: Any) -> float:
    """Bytes by `megatron.training.theoretical_memory_usage`, which comes with Megatron-Core 0.19.

    Raises:
        ImportError: It is not there.
    """
    from megatron.training import theoretical_memory_usage as theory

    from megatron_mux.memory.forms.skeleton import read_architecture

    a = read_architecture(skeleton)
    gated, rms_norm = a.inner > a.ffn, any("RMSNorm" in name for name in skeleton.tensors.kinds)
    arguments = argparse.Namespace(
        add_bias_linear=not rms_norm,
        data_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        ffn_hidden_size=a.ffn,
        group_query_attention=a.kv_heads != a.heads,
        hidden_size=a.hidden,
        kv_channels=a.head_dim,
        micro_batch_size=case.batch,
        moe_latent_size=None,
        moe_layer_freq=1,
        mtp_num_layers=None,
        multi_latent_attention=False,
        normalization="RMSNorm" if rms_norm else "LayerNorm",
        num_attention_heads=a.heads,
        num_experts=None,
        num_layers=len(a.layers),
        num_query_groups=a.kv_heads,
        padded_vocab_size=a.vocabulary,
        pipeline_model_parallel_size=1,
        recompute_granularity="full" if case.recompute else None,
        seq_length=case.length,
        sequence_parallel=False,
        swiglu=gated,
        tensor_model_parallel_size=1,
        untie_embeddings_and_output_weights=not a.tied,
        use_distributed_optimizer=False,
        virtual_pipeline_model_parallel_size=None,
        world_size=1,
        moe_shared_expert_intermediate_size=None,
        moe_ffn_hidden_size=None,
        moe_router_topk=1,
        hybrid_layer_pattern=None,
        is_hybrid_model=False,
    )
    weights = theory.compute_weight_and_optimizer_memory(arguments)
    return float(weights + theory.compute_activation_memory_without_sp(arguments, 1))


# -- after


def measurements(predicted: Mapping[str, Any], only: Sequence[str] | None, partial: Path) -> dict[str, Any]:
    """Every case and every limit, each run in a process of its own; written to a file as they are obtained."""
    found: dict[str, Any] = {"cases": {}, "limits": []}

    def save() -> None:
        partial.write_text(json.dumps(found, indent=1) + "\n")

    for name, about in predicted["cases"].items():
        if wanted(name, only):
            measured = run({**about["asked"], "limit": None, "history": True}, name)
            found["cases"][name] = {**about, "measured": measured}
            save()
    for about in predicted["limits"]:
        if not wanted(about["case"], only):
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
    """What one run measures; why it failed, if it did other than by lack of memory."""
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
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        return {"failed": words[-1]}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether a case was asked for."""
    return only is None or any(word in name for word in only)


def machine() -> dict[str, str]:
    """What is measured on."""
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
    """What was predicted."""
    rows = [
        (name, f"{one['peak_allocated'] / GIB:.3f}", f"{one['peak_reserved'] / GIB:.3f}", one["moment"])
        for name, one in result["cases"].items()
    ]
    lines = [*table("case | allocated (GiB) | reserved (GiB) | the peak", rows), ""]
    limits = [(one["case"], one["limit"] // GIB, one["largest"]) for one in result["limits"]]
    told = ", ".join(f"{name} {number}" for name, number in result["predicted_with"].items())
    lines += table("case | limit (GiB) | largest batch", limits)
    return "\n".join([f"Predicted with {told}, for {result['predicted_for']}. Nothing measured.", "", *lines])


def error(predicted: float, measured: float) -> float:
    """Relative, signed."""
    return predicted / measured - 1


def measured_tables(result: Mapping[str, Any]) -> str:
    """Predicted and measured, and what the goals come to."""
    rows, errors = [], []
    others: dict[str, list[float]] = {}
    ours_there: dict[str, list[float]] = {}
    exact = 0
    for name, one in result["cases"].items():
        told = one["measured"]
        if "failed" in told or not told["fits"]:
            rows.append(
                (name, f"{one['peak_reserved'] / GIB:.3f}", told.get("failed") or told["why"], "", "", "")
            )
            continue
        reserved = told["peak_reserved"]
        errors.append(off := error(one["peak_reserved"], reserved))
        replayed = "replay_failed" not in told and told["first_event_replayed_otherwise"] is None
        exact += replayed
        process = reserved + told["outside"]
        for other, said in one["others"].items():
            others.setdefault(other, []).append(error(said, process))
            ours_there.setdefault(other, []).append(error(one["process"], process))
        rows.append(
            (
                name,
                f"{one['peak_reserved'] / GIB:.3f}",
                f"{reserved / GIB:.3f}",
                f"{off:+.2%}",
                f"{error(one['peak_allocated'], told['peak_allocated']):+.2%}",
                "yes"
                if replayed
                else told.get("replay_failed") or f"not event {told['first_event_replayed_otherwise']}",
            )
        )
    head = ", ".join(f"{name} {number}" for name, number in result["machine"].items())
    titles = "case | reserved, predicted (GiB) | measured | off | allocated off | history replayed exactly"
    lines = [f"Measured on: {head}.", "", *table(titles, rows), ""]
    if errors:
        sizes = sorted(map(abs, errors))
        lines.append(
            f"Reserved: median {statistics.median(sizes):.2%} off (goal {GOALS['median']:.0%}), worst {sizes[-1]:.2%} "
            f"(goal {GOALS['worst']:.0%}), of {len(sizes)}; {exact} histories replayed exactly."
        )
    for other, found in others.items():
        mine = statistics.median(map(abs, ours_there[other]))
        lines.append(
            f"Process, of {len(found)} cases {other} knows: it is {statistics.median(map(abs, found)):.1%} off, "
            f"ours {mine:.1%} (medians)."
        )
    return "\n".join([*lines, "", *limit_table(result["limits"])])


def limit_table(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    """The predicted largest batch, and one more."""
    rows = []
    for one in limits:
        least, most = (one["measured"][str(one["largest"] + more)] for more in (0, 1))
        words = [ran.get("failed") or ("runs" if ran["fits"] else "does not fit") for ran in (least, most)]
        rows.append((one["case"], one["limit"] // GIB, one["largest"], *words))
    return table("case | limit (GiB) | predicted largest batch | it | one more", rows)


if __name__ == "__main__":
    sys.exit(main())
