"""Check that two commits answer commands alike: tools' JSON, predicted bytes and seconds, launches, help, errors.

    python benchmarks/same_answers.py OLD_COMMIT [NEW_COMMIT] [--within 0.025] [--only TEXT]... [--output FILE]

Each commit is checked out into a temporary directory and asked there, in one process on a CPU (`frozen/answers.py`
lists all): every command's `--help`; plans and predictions of bytes for Llama 8B and 70B and Mixtral, of an H100 that
is not there; chat, merge, combine, export and convert with an adapter that the commit has trained; mistakes in flags
and task files; launches and waits of a step, counted by the commit's own `launches.py`. Answers must be equal in
words, keys and statuses; numbers may differ by a part of their value with `--within`. Times that a clock gave are left
out. Without NEW_COMMIT the working tree is compared. `--output` keeps both sides' answers as JSON.

Exit status: 0 if all answers agree, 1 if one differs or a commit cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from frozen.answered import apart, said
from frozen.answers import ask, questions
from frozen.checkouts import check_out
from frozen.inputs import write_inputs
from frozen.runs import train


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="a commit (default: the working tree)")
    parser.add_argument("--within", type=float, default=0.0, metavar="PART", help="of a number's value (0)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="answers with this in their name"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep both sides' answers here")
    return parser


def answers_of(commit: str | None, scratch: Path, inputs: Path, only: list[str]) -> dict[str, dict[str, Any]]:
    """What a commit answers, by name; see `said`, with its `seconds`.

    Raises:
        RuntimeError: It cannot be asked.
    """
    code, results, trained = (scratch / name for name in ("code", "results", "trained"))
    for directory in (code, results, trained):
        directory.mkdir(parents=True)
    check_out(commit, code)
    asked = [
        question
        for question in questions(inputs, results, trained)
        if not only or any(text in question[1] for text in only)
    ]
    if any(str(trained) in word for _, _, words in asked for word in words):
        problem = train(code, inputs, trained, ["micro-batches"])
        if problem:
            raise RuntimeError(problem)
    places = {str(code): "CODE", str(results): "RESULTS", str(trained): "TRAINED", str(inputs): "INPUTS"}
    found = ask(code, asked, results)
    return {name: {**said(answer, places), "seconds": answer["seconds"]} for name, answer in found.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], within: float) -> list[str]:
    """A line for each difference of answers of the same name."""
    return [
        f"{name}{line}"
        for name in old
        for line in apart(*({**side[name], "seconds": 0} for side in (old, new)), within)
    ]


def main() -> int:
    """Ask both commits and compare."""
    arguments = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)

        inputs = root / "inputs"
        inputs.mkdir()
        write_inputs(inputs)

        def answered(side: str) -> dict[str, dict[str, Any]]:
            return answers_of(getattr(arguments, side), root / side, inputs, arguments.only)

        with ThreadPoolExecutor(2) as pool:
            try:
                old, new = pool.map(answered, ("old", "new"))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"old": old, "new": new}, indent=1) + "\n")
    found = differences(old, new, arguments.within)
    print(*found[:60], sep="\n", end="\n" if found else "")
    seconds = [sum(answer["seconds"] for answer in side.values()) for side in (old, new)]
    print(f"{len(old)} answers in {seconds[0]:.0f} and {seconds[1]:.0f} s: {len(found)} differences")
    return 1 if found or not old else 0


if __name__ == "__main__":
    sys.exit(main())
