"""Check that two commits train the same adapters, bit for bit or to rounding, and leave the same files.

    python benchmarks/same_adapters.py OLD_COMMIT [NEW_COMMIT] [--within 1e-4 1e-6] [--leave-out lora-dropout]
        [--run NAME]...

Each commit is checked out into a temporary directory and trains the same tasks there: every adapter kind, optimizer and
padding, on tiny random backbones, with plans that flags fix, on CPUs with one thread a process. One process trains in
fp32 and bf16, on experts, on NF4, with preferences, and resumed; two processes divide layers, stages, data, weights and
experts; a client trains through a split server (`frozen/runs.py` lists all). Then all tensors of all checkpoints are
compared, all losses, the keys of metrics and the files of saves. Without NEW_COMMIT the working tree is compared,
including uncommitted changes. With `--within`, tensors may differ by the first number relative to their norm, and
losses by the second.

Exit status: 0 if all is equal, 1 if something differs or a run fails. `same_answers.py` compares what commands print.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from frozen.checkouts import check_out
from frozen.inputs import write_inputs
from frozen.runs import RUNS, train, train_split
from frozen.trained import layouts_apart, losses_apart, tensors_apart

SPLIT = "split"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="a commit (default: the working tree)")
    parser.add_argument("--within", type=float, nargs=2, metavar=("TENSORS", "LOSSES"), default=(0.0, 0.0))
    parser.add_argument("--leave-out", action="append", default=[], metavar="TASK", help="may be repeated")
    parser.add_argument("--run", action="append", choices=[*RUNS, SPLIT], help="may be repeated (all)")
    return parser


def main() -> int:
    """Train with both commits and compare."""
    arguments = build_parser().parse_args()
    names = arguments.run or [*RUNS, SPLIT]
    with tempfile.TemporaryDirectory() as scratch:
        places = {name: Path(scratch) / name for name in ("inputs", "old", "new", "old-runs", "new-runs")}
        for place in places.values():
            place.mkdir()
        write_inputs(places["inputs"])

        def make(side: str) -> str:
            check_out(getattr(arguments, side), places[side])
            given = places[side], places["inputs"], places[f"{side}-runs"]
            problem = train(*given, [name for name in names if name != SPLIT])
            return problem or (train_split(*given) if SPLIT in names else "")

        with ThreadPoolExecutor(2) as pool:
            for side, problem in zip(("old", "new"), pool.map(make, ("old", "new")), strict=True):
                if problem:
                    print(f"{side}: training failed\n{problem}", file=sys.stderr)
                    return 1
        runs = places["old-runs"], places["new-runs"]
        compared, found, most = tensors_apart(*runs, arguments.within[0], arguments.leave_out)
        found += layouts_apart(*runs)
        losses = losses_apart(*runs, arguments.leave_out)
        if losses > arguments.within[1]:
            found.append(f"a loss differs by {losses:.1e}")
    print(*found[:20], sep="\n", end="\n" if found else "")
    verdict = f"{len(found)} differ" if found else "all agree" if most or losses else "all are bit-identical"
    print(f"{compared} tensors of {len(names)} runs compared: {verdict}")
    print(f"apart at most: tensors {most:.1e}, losses {losses:.1e}")
    return 1 if found or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
