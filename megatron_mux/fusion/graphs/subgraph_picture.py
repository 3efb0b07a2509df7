"""A picture of a layer's subgraphs over time, when no other hybrid task hides its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs, Subgraph
from megatron_mux.pipeline.lanes import Lanes, Span, draw
from megatron_mux.pipeline.svg import document

_COLOURS = {"compute": "#56B4E9", "adapter": "#E69F00", "message": "#999999"}


def timeline(subgraphs: Sequence[Subgraph]) -> Iterator[tuple[str, float, float, str]]:
    """Yield kind (`compute`, `adapter` or `message`), start and end in seconds, and text of everything that takes time.

    One subgraph is computed at a time, in order, and one message is on its way at a time.
    """
    clock = link_free = 0.0
    arrived: dict[int, float] = {}
    for index, subgraph in enumerate(subgraphs):
        start = max([clock, *(arrived[i] for i in subgraph.awaits)])
        clock = start + subgraph.seconds
        yield subgraph.kind, start, clock, f"{index}: {', '.join(subgraph.modules)}"
        if subgraph.message:
            begin = max(clock, link_free)
            arrived[index] = link_free = begin + subgraph.message_seconds
            yield "message", begin, link_free, f"{index}: {subgraph.message} of {subgraph.bytes} bytes"


def to_svg(layers: Sequence[LayerSubgraphs]) -> str:
    """Draw both passes of each kind of layer: a lane for computation, below it one for messages."""
    rows = []
    for graphs in layers:
        for name, subgraphs in graphs.passes.items():
            spans = [_span(*pair) for pair in timeline(subgraphs)]
            whole = max((span.stop for span in spans), default=0.0)
            rows.append(Lanes(f"{str(graphs).partition(';')[0]}, {name}: {whole * 1e3:.4g} ms", spans))
    parts, height = draw(rows, _COLOURS)
    return document(parts, height + 6)


def _span(kind: str, start: float, stop: float, text: str) -> Span:
    return Span(kind == "message", start, stop, _COLOURS[kind], text, text.partition(":")[0])
