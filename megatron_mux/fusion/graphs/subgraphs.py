"""Subgraphs of a layer: runs of operators that end with a message or at an adapter (MuxTune section 3.4.2).

Compute operators that follow each other form a subgraph, a communication operator ends its subgraph, and adapters,
which are small, stand apart. A subgraph's priority is its topological depth. `layer_graph.py` traces the operators.

Data, nothing else: it is part of a plan file, and prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import ConfigDict

from megatron_mux.backbone.pieces import MessageKind

SubgraphKind = Literal["compute", "adapter"]


@dataclass(frozen=True)
class Operator:
    """An operator of a traced graph.

    Attributes:
        name: Unique in its graph: the module it belongs to, and the graph's own name for it.
        inputs: Operators whose results it needs; other names are inputs of the graph.
        seconds: Predicted.
        bytes: Of a message: what this rank gives.
    """

    name: str
    kind: SubgraphKind | MessageKind
    inputs: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it communicates."""
        return self.kind in get_args(MessageKind)


@dataclass(frozen=True)
class Subgraph:
    """Operators that are launched together.

    Attributes:
        kind: Whether they belong to the backbone or to adapters.
        operators: Their names, in order; the message that ends the subgraph is the last.
        seconds: Predicted, of computation.
        depth: Topological depth among the subgraphs of the pass: those of least depth go first.
        needs: Indices of subgraphs whose computed results it needs.
        awaits: Indices of subgraphs whose messages it needs.
        message: The communication operator that ends it, if any.
        bytes: That this rank gives to the message.
        message_seconds: Predicted.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: SubgraphKind
    operators: tuple[str, ...]
    seconds: float
    depth: int
    needs: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()
    message: MessageKind | None = None
    bytes: int = 0
    message_seconds: float = 0.0

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its operators belong to, in order."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] or "sum" for name in self.operators))

    def __str__(self) -> str:
        sent = f", then {self.message} of {self.bytes} bytes" if self.message else ""
        after = "".join(
            f"; {what} {', '.join(map(str, those))}"
            for what, those in (("needs", self.needs), ("awaits the message of", self.awaits))
            if those
        )
        took = f"{self.seconds * 1e3:.3g} ms" + f" + {self.message_seconds * 1e3:.3g} ms" * bool(self.message)
        return f"depth {self.depth}, {self.kind}: {', '.join(self.modules)}{sent} ({took}){after}"


@dataclass(frozen=True)
class LayerSubgraphs:
    """The subgraphs of both passes of a layer, which are those of every layer of its kind.

    Attributes:
        layers: Global indices of these layers.
        rows: Of the micro-batch.
        tensor: Ranks that share the layer.
        sequence_parallel: Whether they divide the rows between attention and MLP.
        costs: Where the predictions come from, for people.
        forward, backward: In an order in which every subgraph comes after those that it needs.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    layers: tuple[int, ...]
    rows: int
    tensor: int
    sequence_parallel: bool
    costs: str
    forward: tuple[Subgraph, ...]
    backward: tuple[Subgraph, ...]

    @property
    def passes(self) -> dict[str, tuple[Subgraph, ...]]:
        """The subgraphs by the name of the pass."""
        return {"forward": self.forward, "backward": self.backward}

    def __str__(self) -> str:
        divided = ", rows divided (sequence parallel)" * self.sequence_parallel
        lines = [
            f"layers {_ranges(self.layers)}: {self.rows} rows, {self.tensor} tensor ranks{divided}; {self.costs}"
        ]
        for name, subgraphs in self.passes.items():
            lines.append(f"  {name}:")
            lines += [f"    {i:2}  {subgraph}" for i, subgraph in enumerate(subgraphs)]
        return "\n".join(lines)


def segment(operators: Sequence[Operator]) -> tuple[Subgraph, ...]:
    """Divide a graph into subgraphs.

    Operators of one kind with no message and no operator of the other kind between them cluster. Where several messages
    leave a cluster it is divided: each message ends a subgraph of what it needs, and what no message needs follows.

    Args:
        operators: In an order in which each comes after those that it needs.
    """
    clusters: dict[tuple[int, SubgraphKind], list[Operator]] = {}
    for operator, level in zip(operators, _levels(operators), strict=True):
        clusters.setdefault((level, _side(operator)), []).append(operator)
    subgraphs: list[Subgraph] = []
    place: dict[str, int] = {}
    messages = {operator.name for operator in operators if operator.is_message}
    parts = ((key[1], part) for key in sorted(clusters) for part in _parts(clusters[key]))
    for index, (kind, part) in enumerate(parts):
        place.update((operator.name, index) for operator in part)
        known = {name for operator in part for name in operator.inputs if place.get(name, index) != index}
        before = {place[name] for name in known}
        last = part[-1]
        computed = sum(operator.seconds for operator in part if not operator.is_message)
        subgraphs.append(
            Subgraph(
                kind,
                tuple(operator.name for operator in part),
                computed,
                max((subgraphs[i].depth + 1 for i in before), default=0),
                tuple(sorted({place[name] for name in known - messages})),
                tuple(sorted({place[name] for name in known & messages})),
                *((last.kind, last.bytes, last.seconds) if last.is_message else ()),
            )
        )
    return tuple(subgraphs)


def _side(operator: Operator) -> SubgraphKind:
    return "adapter" if operator.kind == "adapter" else "compute"


def _levels(operators: Sequence[Operator]) -> Iterator[int]:
    """For each operator, the most changes of subgraph on a path that leads to it.

    An operator that needs inputs of the graph alone could come early; it stays with those of its kind before it.
    """
    level: dict[str, int] = {}
    known: dict[str, Operator] = {}
    latest: dict[SubgraphKind, int] = {"compute": 0, "adapter": 0}
    for operator in operators:
        side = _side(operator)
        before = [known[name] for name in operator.inputs if name in known]
        changes = (level[o.name] + (o.is_message or _side(o) != side) for o in before)
        level[operator.name] = max(changes, default=latest[side])
        latest[side] = level[operator.name] + operator.is_message
        known[operator.name] = operator
        yield level[operator.name]


def _parts(members: Sequence[Operator]) -> Iterator[list[Operator]]:
    """Divide a cluster so that each message comes last."""
    left = {operator.name: operator for operator in members}
    for message in [operator for operator in members if operator.is_message]:
        needed, todo = set(), [message.name]
        while todo:
            name = todo.pop()
            if name in left and name not in needed:
                needed.add(name)
                todo += left[name].inputs
        yield [left.pop(operator.name) for operator in members if operator.name in needed]
    if left:
        yield list(left.values())


def _ranges(indices: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
