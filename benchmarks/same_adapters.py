"""Check that two commits train the same adapters, bit for bit or to rounding.

    python benchmarks/same_adapters.py OLD_COMMIT [NEW_COMMIT] [--within 1e-4 1e-6] [--leave-out lora-dropout]

Each commit is checked out into a temporary directory and trains the same tasks there: every adapter kind, optimizer and
padding, on tiny random Llama and GPT-2 backbones, with plans that flags fix (spatial, temporal, serial; micro-batches
and chunks of a given size), in one CPU process with one thread. Then all tensors of all checkpoints are compared.
Without NEW_COMMIT the working tree is compared, including uncommitted changes. With `--within`, tensors may differ by
the first number relative to their norm, and losses by the second.

Exit status: 0 if all tensors are equal, 1 if one differs or a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORDS = 90

TRAINING: dict[str, Any] = {"per_device_train_batch_size": 3, "learning_rate": 0.01, "max_steps": 6}
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}

RUNS: dict[str, tuple[str, list[str]]] = {
    "spatial": ("llama", ["--mux-policy", "spatial", "--mux-micro-batches", "1"]),
    "micro-batches": ("llama", ["--mux-policy", "spatial", "--mux-micro-batches", "3"]),
    "chunks": ("llama", ["--mux-policy", "temporal", "--mux-chunk-size", "8"]),
    "recomputed": ("llama", ["--mux-policy", "temporal", "--recompute-granularity", "full"]),
    "serial-padded": ("llama", ["--mux-policy", "serial", "--mux-align", "max-length"]),
    "gpt2": ("gpt2", ["--mux-policy", "spatial", "--mux-micro-batches", "2"]),
}
"""Each run's backbone, and the flags that fix its plan."""


def tasks_for(family: str) -> list[dict[str, Any]]:
    """Make tasks of each adapter kind that both commits are expected to support."""
    query, inputs, outputs = {
        "llama": (["q_proj", "v_proj"], "down_proj", "o_proj"),
        "gpt2": (["c_attn"], "mlp.c_proj", "attn.c_proj"),
    }[family]
    adapters: dict[str, dict[str, Any]] = {
        "lora": {**LORA, "target_modules": query},
        "lora-dropout": {**LORA, "lora_dropout": 0.2, "target_modules": [*query, inputs]},
        "lora-everywhere": {**LORA, "r": 6, "use_rslora": True, "target_modules": "all-linear"},
        "ia3": {"peft_type": "IA3", "target_modules": [*query, inputs], "feedforward_modules": [inputs]},
        "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
        "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 5, "non_linearity": "gelu"},
        "diff": {"peft_type": "DIFF_PRUNING", "sparsity": 0.8, "target_modules": [outputs]},
    }
    tasks = []
    for seed, (name, adapter) in enumerate(adapters.items()):
        training = {**TRAINING, "seed": seed}
        if name == "prefix":
            training |= {"optim": "sgd", "learning_rate": 0.1}
        if name == "lora-everywhere":
            training |= {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
        data = {"path": f"{'texts' if seed % 2 else 'pairs'}.jsonl", "max_length": 24}
        tasks.append({"name": name, "adapter": adapter, "data": data, "training": training})
    return tasks


def write_inputs(directory: Path) -> None:
    """Write backbones with a tokenizer, records and task files; they are the same on every call."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        LlamaConfig,
        PretrainedConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    chosen = random.Random(0)

    def words(fewest: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(WORDS)}" for _ in range(chosen.randint(fewest, most)))

    records = {
        "pairs.jsonl": [{"prompt": words(1, 12), "completion": words(1, 6)} for _ in range(20)],
        "texts.jsonl": [{"text": words(2, 20)} for _ in range(20)],
    }
    for name, rows in records.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {name: i for i, name in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    configs: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, **ends,
        ),
        "gpt2": GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=3, n_head=4, **ends),
    }  # fmt: skip
    for family, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(directory / family)
        fast.save_pretrained(directory / family)
        # JSON is YAML.
        (directory / f"{family}.yaml").write_text(json.dumps({"tasks": tasks_for(family)}))


def check_out(commit: str | None, directory: Path) -> None:
    """Put the files of a commit, or of the working tree if None, into `directory`."""
    if commit is None:
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z", "megatron_mux", "pretrain_mux.py"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes((ROOT / name).read_bytes())
        return
    archive = subprocess.run(
        ["git", "archive", commit, "megatron_mux", "pretrain_mux.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)


def train(code: Path, inputs: Path, results: Path) -> str:
    """Train all runs with the code in `code`; returns the end of the output if training fails, else an empty string."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_MUX_CACHE": str(results / "cache")}
    script = (
        "import json, sys; from pretrain_mux import main\n"
        "sys.exit(any([main(argv) for argv in json.loads(sys.argv[1])]))"  # one import for all runs
    )
    commands = [
        [
            "--backbone", str(inputs / family), "--mux-tasks", str(inputs / f"{family}.yaml"),
            "--save", str(results / name), "--save-interval", "2", "--mux-no-progress", *flags,
        ]
        for name, (family, flags) in RUNS.items()
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        check=False,
        cwd=code,
        env=environment,
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def losses_apart(old: Path, new: Path, left_out: Collection[str]) -> float:
    """The largest relative difference of a loss in any step of two directories of runs."""
    apart = 0.0
    for file in sorted(old.glob("*/*/metrics.jsonl")):
        if file.parent.name not in left_out:
            sides = (file, new / file.relative_to(old))
            before, after = ([json.loads(line)["loss"] for line in side.open()] for side in sides)
            pairs = zip(before, after, strict=True)
            apart = max([apart, *(abs(a - b) / abs(a) for a, b in pairs)])
    return apart


def differences(
    old: Path, new: Path, within: float = 0.0, left_out: Collection[str] = ()
) -> tuple[int, list[str], float]:
    """Compare the checkpoints of two directories of runs.

    Args:
        old, new: The directories.
        within: How far tensors may be apart, relative to their norm.
        left_out: Tasks that are not compared.

    Returns:
        The number of tensors, a line per difference, and how far tensors are apart at most.
    """
    import torch
    from safetensors.torch import load_file

    pattern = "*/*/checkpoint-*/adapter_model.safetensors"
    files = {
        root: sorted(str(p.relative_to(root)) for p in root.glob(pattern) if p.parts[-3] not in left_out)
        for root in (old, new)
    }
    found = [f"{name}: written by one commit only" for name in sorted(set(files[old]) ^ set(files[new]))]
    compared, most = 0, 0.0
    for name in sorted(set(files[old]) & set(files[new])):
        before, after = load_file(old / name), load_file(new / name)
        if before.keys() != after.keys():
            found.append(f"{name}: different tensors: {sorted(before.keys() ^ after.keys())[:3]}")
        for key in before.keys() & after.keys():
            compared += 1
            if before[key].dtype != after[key].dtype or not torch.equal(before[key], after[key]):
                apart = float((before[key] - after[key]).norm() / before[key].norm().clamp(min=1e-30))
                most = max(most, apart)
                if apart > within:
                    found.append(f"{name}: {key} differs by {apart:.1e}")
    return compared, found, most


def main() -> int:
    """Train with both commits and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="a commit (default: the working tree)")
    parser.add_argument("--within", type=float, nargs=2, metavar=("TENSORS", "LOSSES"), default=(0.0, 0.0))
    parser.add_argument("--leave-out", action="append", default=[], metavar="TASK", help="may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        places = {name: Path(scratch) / name for name in ("inputs", "old", "new", "old-runs", "new-runs")}
        for place in places.values():
            place.mkdir()
        write_inputs(places["inputs"])
        for side in ("old", "new"):
            check_out(getattr(arguments, side), places[side])
        with ThreadPoolExecutor(2) as pool:
            sides = [(places[s], places["inputs"], places[f"{s}-runs"]) for s in ("old", "new")]
            for side, problem in zip(("old", "new"), pool.map(lambda s: train(*s), sides), strict=True):
                if problem:
                    print(f"{side}: training failed\n{problem}", file=sys.stderr)
                    return 1
        runs = places["old-runs"], places["new-runs"]
        compared, found, most = differences(*runs, arguments.within[0], arguments.leave_out)
        losses = losses_apart(*runs, arguments.leave_out)
        if losses > arguments.within[1]:
            found.append(f"a loss differs by {losses:.1e}")
    print(*found[:20], sep="\n", end="\n" if found else "")
    verdict = f"{len(found)} differ" if found else "all agree" if most or losses else "all are bit-identical"
    print(f"{compared} tensors of {len(RUNS)} runs compared: {verdict}")
    print(f"apart at most: tensors {most:.1e}, losses {losses:.1e}")
    return 1 if found or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
