"""Persistent memory of one body for all clients and of a body for each, and equation 3 against measured bytes."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.split.server.body import Body


def measure_memory(backbone: Path, most: int, rows: int, longest: int) -> dict[str, Any]:
    """Measure both in processes of their own, for their resident sizes.

    Args:
        backbone: Hugging Face directory.
        most: Clients, from one to so many.
        rows, longest: Of a request, and of a sequence.
    """
    found: dict[str, Any] = {"rows": rows}
    for name, copies in (("shared", False), ("copies", True)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found[name] = pool.submit(grow, backbone, most, copies, rows, longest).result()
    return found


def grow(backbone: Path, most: int, copies: bool, rows: int, longest: int) -> list[dict[str, Any]]:
    """Let clients join a server one after the other, each of which takes a step; measure after each.

    Persistent bytes are the storages of all live tensors of the process, each counted once by its address. They and the
    resident size are beyond what there was before the first body was read.

    Args:
        backbone: Hugging Face directory.
        most: Clients.
        copies: Whether each has the parameters for itself.
        rows, longest: Of a request, and of a sequence.
    """
    from process_memory import resident_bytes, tensor_bytes
    from split_model import proposal

    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_shape
    from megatron_mux.split.server.body import Body
    from megatron_mux.split.server.session_compute import attach
    from megatron_mux.split.server.session_prediction import BodyPlace, predict, prediction_worker

    shape, parallel = read_shape(backbone), runtime.initialize(device="cpu")
    before = _set_aside()
    split = (1, shape.layers - 1, 0)

    def load() -> Body:
        return Body(Backbone.load(backbone, parallel, split=split, stage=1, ends=False), parallel)

    bodies = [load()]
    place, found, lasting = BodyPlace.of(bodies[0], range(1, shape.layers)), [], 0
    for count in range(1, most + 1):
        if copies and count > 1:
            bodies.append(load())
        name, asked, body = f"client-{count}/task", proposal("", rows, longest), bodies[-1]
        part = asked.body(shape)
        attach(body, name, asked, part)
        predicted = prediction_worker().submit(predict, place, asked).result()
        lasting += body.bytes_of(name)
        peak = _step(body, name, part, rows, longest)
        persistent, resident = tensor_bytes(), resident_bytes() - before
        weights = body.shared_bytes * len(bodies)
        found.append(
            {
                "clients": count,
                "persistent": persistent,
                "resident": resident,
                "measured": persistent + peak,
                "predicted": weights + count * predicted.lasting + predicted.backward,
                "weights": weights,
                "lasting": lasting,
                "request": peak,
            }
        )
    gc.unfreeze()
    return found


def _set_aside() -> int:
    """Leave what there is out of what `tensor_bytes` counts; returns the resident size."""
    from process_memory import resident_bytes

    resident = resident_bytes()  # it collects garbage first
    gc.freeze()
    return resident


def _step(body: Body, name: str, layers: range, rows: int, longest: int) -> int:
    """Take an optimizer step as with `on-demand`; returns the most bytes that its requests made beyond their input."""
    import torch

    from megatron_mux.split.server.body import Rows
    from tests.unit.split.counted import meter

    lengths = (longest,) * (rows // longest)
    hidden = torch.randn(rows, body.backbone.shape.hidden)
    request = Rows(name, lengths, tuple(range(len(lengths))), 0, True, hidden, True)

    def passes() -> None:
        body.forward([request], layers, graph=False)
        _, kept = body.forward([request], layers, graph=True)
        assert kept is not None
        body.backward(kept, [hidden])

    peak = meter(torch.device("cpu"))(passes)
    body.update(name, 0, body.squared_norm(name, 0) ** 0.5, False)
    return peak.peak
