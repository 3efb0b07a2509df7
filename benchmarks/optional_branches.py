"""Branches on optional parts in the core: conditions that name expert managers, preferences, saves and the like.

    python benchmarks/optional_branches.py                            # of this checkout
    python benchmarks/optional_branches.py --package OLD/megatron_mux --list

Counted are conditions (`if`, `elif`, `while`, conditional expressions, filters of comprehensions) of the engine's
step, the backbone, the planner, the pipeline and the training loop that name one of `NAMES`. Files that are an
optional part themselves are left out.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from script import add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]

CORE = (
    "adapters", "backbone", "batch", "engine", "fusion", "pipeline", "process_groups.py", "runtime.py",
    "training/loop.py",
)  # fmt: skip
"""Files, or how their paths begin, that are looked at."""

PARTS = (
    "backbone/experts/at_start.py", "backbone/experts/from_master.py", "backbone/experts/master_exchange.py",
    "batch/balancing.py",
    "backbone/weight_offload.py", "engine/balancing_loss.py", "engine/expert_managers.py", "engine/expert_moves.py",
    "engine/forward_passes.py", "engine/hand_over.py", "engine/log_probs.py", "engine/extensions.py",
    "engine/preference", "engine/reference.py", "engine/tied_rows.py", "fusion/planner/load.py",
)  # fmt: skip
"""Of those, the ones that are an optional part or choose among them."""

NAMES = {
    "expert managers": ("broker", "is_manager", "holds_rows", "divides_adapters", "lowest_adapter"),
    "expert watch": ("watch", "observe"),
    "preferences": (
        "is_preference", "needs_kl", "refers_in_steps", "needs_reference", "preferences", "mismatched", "reference",
        "figures", "scales",
    ),
    "balancing losses": ("coefficients", "router_aux_loss_coef", "router_loads", "balanced"),
    "tied rows": ("_tied",),
    "saves": ("_saver", "saver", "lock"),
}  # fmt: skip
"""Names by the part that they belong to."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--package", type=Path, default=ROOT / "megatron_mux", help="of a checkout (this one)"
    )
    parser.add_argument("--list", action="store_true", help="each condition, too")
    add_output(parser)
    return parser.parse_args(argv)


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """The conditions of a file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def part_of(condition: ast.expr) -> str | None:
    """The optional part that a condition names."""
    own = {node.attr for node in ast.walk(condition) if isinstance(node, ast.Attribute)}
    own |= {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)}
    return next((part for part, names in NAMES.items() if own.intersection(names)), None)


def branches(package: Path) -> Iterator[tuple[str, int, str, str]]:
    """File, line, part and text of each branch."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith(CORE) and not name.startswith(PARTS):
            for condition in conditions(ast.parse(path.read_text())):
                if (part := part_of(condition)) is not None:
                    yield name, condition.lineno, part, ast.unparse(condition)


def main(argv: Sequence[str] | None = None) -> int:
    """Count and publish."""
    arguments = parse(argv)
    found = list(branches(arguments.package))
    counts = Counter(part for _, _, part, _ in found)
    lines = [f"{len(found)} branches on optional parts.", "", *table("part | branches", counts.items())]
    if arguments.list:
        lines += [
            "",
            *table("where | condition", [(f"{name}:{line}", text) for name, line, _, text in found]),
        ]
    publish({"branches": len(found), "parts": counts}, "\n".join(lines), arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
