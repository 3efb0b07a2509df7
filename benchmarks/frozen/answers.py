"""What commands answer, and mistakes that a run refuses, as a list; and how a commit is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from frozen.checkouts import environment_of
from frozen.inputs import TASK_FILES

COMMANDS = (
    "train", "plan", "estimate", "profile", "draw", "convert", "chat", "merge", "combine", "export", "profile-experts",
    "measure-topology", "place-experts", "split-server", "split-client", "split-certificates", "split-export",
)  # fmt: skip

_PLAN = "plan --backbone {inputs}/planned --tasks {inputs}/many.yaml --device H100 --json"
_FEW = _PLAN.replace("many", "few")
_BYTES = "estimate --gpu-memory 80GiB --device H100 --json"
_MANY = "--tasks {inputs}/many.yaml --sequence-length 1024"
_LORA = "{trained}/micro-batches/lora/checkpoint-6"

ANSWERS: Mapping[str, str] = {
    **{f"help of {name}": f"{name} --help" for name in COMMANDS},
    "plan, one rank": _PLAN,
    "plan, two stages": f"{_PLAN} --stages 2",
    "plan, tensor ranks": f"{_FEW} --tensor-parallel 4 --sequence-parallel",
    "plan, limited": f"{_PLAN} --stages 2 --memory-limit 2GiB",
    "plan, recomputed": f"{_PLAN} --memory-limit 1GiB --recompute-granularity full",
    "plan, sharded": f"{_PLAN} --data-parallel 2 --backbone-weights sharded",
    "plan, quantised": f"{_PLAN} --backbone-dtype nf4",
    "plan, ranks chosen": f"{_FEW} --gpus 2",
    "plan, kept": f"{_PLAN} --output {{results}}/plan.json",
    "draw, plan": "draw --plan {results}/plan.json --output {results}/plan.svg --trace {results}/trace.json --json",
    "draw, subgraphs": "draw --subgraphs --backbone {inputs}/shape-8b --tensor-parallel 2 --rows 4096 --json",
    "estimate, tasks, one": f"{_BYTES} --model {{inputs}}/shape-8b --gpus 1 {_MANY}",
    "estimate, tasks": f"{_BYTES} --model {{inputs}}/shape-70b --gpus 8 {_MANY}",
    "estimate, experts": f"{_BYTES} --model {{inputs}}/shape-experts --gpus 8 {_MANY}",
    "estimate, quantised": f"{_BYTES} --model {{inputs}}/shape-70b --gpus 2 --backbone-dtype nf4 {_MANY}",
    "estimate, full": f"{_BYTES} --model {{inputs}}/shape-8b --gpus 8 --sequence-length 1024",
    "estimate, full, batch": f"{_BYTES} --model {{inputs}}/shape-8b --gpus 8 --sequence-length 512 --batch-size 4",
    "estimate, dry run": f"{_BYTES} --model {{inputs}}/shape-8b --gpus 2 --method dry-run {_MANY}",
    "estimate, dry run of the plan": (
        f"{_BYTES} --model {{inputs}}/planned --gpus 1 --method dry-run --plan {{results}}/plan.json {_MANY}"
    ),
    "chat": f"chat --backbone {{inputs}}/llama --adapter a={_LORA} --prompt w1 --plain --max-new-tokens 5 --json",
    "merge": f"merge --backbone {{inputs}}/llama --adapter {_LORA} --output {{results}}/merged --json",
    "combine": f"combine --adapter a={_LORA} b={_LORA} --weights 1 0.5 --output {{results}}/combined --json",
    "export": f"export --backbone {{inputs}}/llama --adapter {_LORA} --output {{results}}/lora.gguf --json",
    "convert": "convert --input {inputs}/llama --output {results}/megatron",
    "profile-experts": (
        "profile-experts --backbone {inputs}/experts --tasks {inputs}/experts.yaml --output {results}/use.json"
    ),
}
"""Command lines of `megatron-mux`; those that read what others wrote come later."""

_RUN = "--backbone {inputs}/llama --mux-tasks {inputs}/llama.yaml"
MISTAKES: Mapping[str, str] = {
    "no tasks": "--backbone {inputs}/llama",
    "no backbone": "--mux-tasks {inputs}/llama.yaml",
    "a missing backbone": "--backbone {inputs}/nowhere --mux-tasks {inputs}/llama.yaml",
    "a missing file": "--backbone {inputs}/llama --mux-tasks {inputs}/nowhere.yaml",
    "an unknown flag": f"{_RUN} --mux-polcy spatial",
    "a flag of tasks": f"{_RUN} --lr 1e-3 --train-iters 5",
    "a refused flag": f"{_RUN} --fp16",
    "ranks": f"{_RUN} --tensor-model-parallel-size 3",
    "a plan of another file": f"{_RUN} --mux-plan {{results}}/plan.json",
    "a limit": f"{_RUN} --mux-memory-limit much",
    "too small a limit": f"{_RUN} --mux-memory-limit 10KiB",
    "an existing run": f"{_RUN} --save {{trained}}/micro-batches",
}
"""Command lines of `pretrain_mux.py` that it refuses."""

_Edit = Callable[[list[dict[str, Any]]], object]
EDITS: Mapping[str, _Edit] = {
    "unknown key of a task": lambda tasks: tasks[0].update(adaptor={}),
    "unknown keys of sections": lambda tasks: (tasks[0]["adapter"].update(rank=4), tasks[1]["training"].update(lr=1)),
    "a field of peft that is not done": lambda tasks: tasks[0]["adapter"].update(lora_bias=True),
    "wrong types": lambda tasks: (tasks[0]["adapter"].update(r="eight"), tasks[1]["training"].update(max_steps=True)),
    "wrong ranges": lambda tasks: (tasks[0]["adapter"].update(r=-1), tasks[6]["adapter"].update(sparsity=1.5)),
    "unknown kind": lambda tasks: tasks[0]["adapter"].update(peft_type="LORAX"),
    "a kind that is not done": lambda tasks: tasks[0]["adapter"].update(peft_type="LOHA"),
    "unknown schedule and optimizer": lambda tasks: tasks[0]["training"].update(lr_scheduler_type="cos", optim="adam"),
    "unknown module": lambda tasks: tasks[0]["adapter"].update(target_modules=["q_prj"]),
    "missing data": lambda tasks: tasks[0]["data"].update(path="gone.jsonl"),
    "a name twice": lambda tasks: tasks[0].update(name=tasks[1]["name"]),
    "a name that is a path": lambda tasks: tasks[0].update(name="../up"),
    "rows of no vocabulary": lambda tasks: tasks[0]["adapter"].update(trainable_token_indices=[4096]),
    "no steps": lambda tasks: tasks[0]["training"].update(max_steps=0),
    "a negative rate": lambda tasks: tasks[0]["training"].update(learning_rate=-1.0),
}  # fmt: skip
"""Changes of the tasks of `llama.yaml` that a run refuses."""

COUNTS: Mapping[str, str] = {
    "launches": "launches.py --tasks 1 --tasks 8 --targets qv --json",
    "launches, everywhere": "launches.py --tasks 8 --targets all-linear --json",
    "launches, other kinds": "launches.py --kind ia3 --kind bottleneck --kind prefix --tasks 4 --json",
    "launches, quantised": "launches.py --tasks 2 --targets qv --quantise nf4 --json",
    "launches, experts": "launches.py --experts 8 --tasks 1 --tasks 8 --json",
}
"""Scripts of benchmarks that count launches and waits of a step, which each commit has itself."""

_ASK = """\
import io, json, os, sys, tempfile, time

def ask(main, words):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        began = time.monotonic()
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
        except BaseException as error:
            status = repr(error)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, saved in zip((1, 2), kept):
                os.dup2(saved, number), os.close(saved)
        out.seek(0), err.seek(0)
        return {"status": status, "out": out.read(), "err": err.read(), "seconds": time.monotonic() - began}

def mux(words):
    from megatron_mux.cli.main import main
    return main(words)

def run(words):
    from pretrain_mux import main
    return main(words)

def count(words):
    import importlib
    sys.path.insert(0, "benchmarks")
    return importlib.import_module(words[0].removesuffix(".py")).main(words[1:])

for kind, name, words in json.load(open(sys.argv[1])):
    print(json.dumps({"name": name, **ask({"mux": mux, "run": run, "count": count}[kind], words)}), flush=True)
"""


def questions(inputs: Path, results: Path, trained: Path) -> list[tuple[str, str, list[str]]]:
    """Who is asked, the answer's name, and the command line of each."""
    found = [("mux", name, line) for name, line in ANSWERS.items()]
    found += [("run", name, line) for name, line in MISTAKES.items()]
    for number, (name, edit) in enumerate(EDITS.items()):
        tasks = TASK_FILES["llama"]()
        edit(tasks)
        # beside the records, which paths in it are relative to
        file = inputs / f"mistake-{number}.yaml"
        file.write_text(json.dumps({"tasks": tasks}))
        found.append(("run", name, f"--backbone {{inputs}}/llama --mux-tasks {file}"))
    found += [("count", name, line) for name, line in COUNTS.items()]
    places = {"inputs": inputs, "results": results, "trained": trained}
    return [(kind, name, [word.format(**places) for word in line.split()]) for kind, name, line in found]


def ask(code: Path, asked: list[tuple[str, str, list[str]]], results: Path) -> dict[str, dict[str, Any]]:
    """What the code in `code` answers, by name: its status, output, errors and seconds.

    Raises:
        RuntimeError: The process that answers died.
    """
    file = results / "questions.json"
    file.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(file)],
        check=False, cwd=code, env=environment_of(code, results), capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if len(found) != len(asked):
        raise RuntimeError(f"it died at {asked[len(found)][1]!r}: {done.stderr[-3000:]}")
    return {answer.pop("name"): answer for answer in found}
