"""Large adapters are joined and saved, and what one client asks for is counted."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_shape
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.link import ServerConnection
from megatron_mux.split.protocol.messages import Leave
from megatron_mux.split.protocol.pieces import Piece, to_index
from megatron_mux.split.protocol.wire import Kind, RefusedError
from megatron_mux.split.server.scheduler import Demand
from tests.unit.split.caller import ROWS, RUN, Caller, backbone, equal, parallel, path, server
from tests.unit.split.running_server import RunningServer, running_server

__all__ = ["backbone", "parallel", "path", "server"]  # fixtures


def test_a_state_travels_in_parts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a LoRA on all linear layers of a 70B model, on eight tensor ranks: its index alone has megabytes."""
    caller = Caller(server)
    caller.join()
    whole = caller.state()
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    pieces = []
    for layer in range(80):
        for name in names:
            divided, other = ("A", "B") if name[-6:] in ("o_proj", "n_proj") else ("B", "A")
            key = f"base_model.model.model.layers.{layer}.{name}.lora_{{}}.weight"
            for kind in ("value", "exp_avg", "exp_avg_sq"):
                pieces.append(Piece(key.format(other), kind, (2, 8), torch.full((2, 8), 1.0 * layer)))
                for rank in range(8):
                    own = torch.full((1, 2), 1.0 * rank)
                    pieces.append(Piece(key.format(divided), kind, (8, 2), own, 0, ((rank, rank + 1),)))
    assert len(json.dumps(to_index(pieces))) > 1 << 20
    saved = []
    monkeypatch.setattr(server.body, "state", lambda name: pieces)
    monkeypatch.setattr(server.store, "save", lambda *arguments: saved.append(arguments))
    again = Caller(server, incarnation="cd" * 8)
    link = ServerConnection(again.transport, again.proposal, read_shape(server.backbone.info.path))
    link.join()
    link._transport.limits = replace(link._transport.limits, piece_bytes=1 << 20)
    found = link.save([])
    assert len(saved) == 1 and server.server.sessions["local/one"].state is None
    assert [(p.key, p.kind, p.runs) for p in found] == [(p.key, p.kind, p.runs) for p in pieces]
    assert equal([p.tensor for p in found], [p.tensor for p in pieces])
    monkeypatch.undo()
    assert equal([p.tensor for p in link.save([])], whole)


def test_a_thousand_patterns_hold_nobody_up(backbone: Backbone, parallel: Parallel, tmp_path: Path) -> None:
    paths = [module.path for module in backbone.shape.modules]
    patterns = {f"{i:04d}.{path}": 3 for i in range(1200 // len(paths)) for path in paths} | {"proj": 3}
    with running_server(backbone, parallel, tmp_path / "store") as server:
        busy_one, hostile = Caller(server), Caller(server, task="many")
        busy_one.join()
        hostile.proposal.adapter["rank_pattern"] = patterns
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            refused = pool.submit(hostile.join)
            slowest = 0.0
            while not refused.done():
                step = time.monotonic()
                busy_one.train_step()
                slowest = max(slowest, time.monotonic() - step)
            assert isinstance(refused.exception(), RefusedError), "they match nothing"
            assert time.monotonic() - began < 2 and slowest < 1


def test_joins_count_for_rate_limits(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, asked = server.server.dispatcher.scheduler, list[Demand]()
    submit = scheduler.submit

    def noting(demand: Demand, now: float) -> None:
        asked.append(demand)
        submit(demand, now)

    monkeypatch.setattr(scheduler, "submit", noting)
    Caller(server).join()
    assert [(demand.client, demand.tokens) for demand in asked] == [("local", 5 * ROWS)]


def test_runs_that_saved_nothing_leave_nothing(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    assert server.store._folder(f"local/one/{RUN}").is_dir()
    caller.call(caller.message(Kind.LEAVE, Leave()))
    assert not server.store._folder(f"local/one/{RUN}").exists()


@pytest.mark.parametrize("field", ["train_rows", "longest"])
def test_no_size_is_more_than_the_rows(server: RunningServer, field: str) -> None:
    caller = Caller(server)
    caller.proposal = caller.proposal.model_copy(update={field: 2 * ROWS + 1})
    with pytest.raises(RefusedError, match="must be at most rows") as refused:
        caller.join()
    assert refused.value.code == "proposal"
