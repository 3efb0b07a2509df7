"""Saves of sessions survive whatever ends the process, and both ends can go back to the same step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.pieces import Piece, assemble, from_index, runs_of, to_index
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.store import SessionStore


def some_pieces(seed: int = 0) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(3, 4, generator=generator)
    columns = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    return [
        Piece("a", "value", (3, 4), whole),
        Piece("a", "exp_avg", (3, 4), whole * 2),
        Piece("p", "value", (2, 9), columns, dim=1, runs=((1, 4), (6, 8))),
    ]


def test_pieces_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.save("me/task", 3, some_pieces())
    found = store.load("me/task", 3)
    assert found is not None
    for own, other in zip(some_pieces(), found, strict=True):
        assert replace(own, tensor=other.tensor) == other
        assert torch.equal(own.tensor, other.tensor)
    older = [{key: value for key, value in own.items() if key != "dtype"} for own in to_index(found)]
    assert len(from_index(older, [piece.tensor for piece in found])) == 3, "as earlier versions saved"
    assert store.load("me/task", 4) is None
    assert store.load("other/task", 3) is None


def test_saves_that_the_client_needs_stay(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    for step in (2, 4, 6):
        store.save("me/task", step, some_pieces(step))
    assert store.steps("me/task") == [2, 4, 6]
    store.save("me/task", 8, some_pieces(8), keep=[4])
    assert store.steps("me/task") == [4, 8]
    store.forget("me/task")
    assert store.steps("me/task") == []


def test_a_finished_session_leaves_a_name(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.save("me/task", 2, some_pieces())
    assert store.finish("me/task", some_pieces()).name == "final-1.safetensors"
    assert store.finish("me/task", some_pieces()).name == "final-2.safetensors"
    store.forget("me/task")
    assert len(list((tmp_path / "me/task").iterdir())) == 2


def test_runs_of_one_client_are_counted(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, most_each=2)
    for run in ("me/task/1", "me/other/2"):
        store.reserve(run)
        store.save(run, 2, some_pieces())
    with pytest.raises(RefusedError, match=r"keeps 2 runs .*--max-runs-each") as refused:
        store.reserve("me/task/3")
    assert refused.value.code == "too_many" and not (tmp_path / "me/task/3").exists()
    with pytest.raises(RefusedError):
        store.finish("me/task", some_pieces())
    store.reserve("me/task/1")  # begins anew
    store.reserve("another/task/3")
    store.forget("me/task/1")
    store.tidy("me/task/1")
    store.tidy("me/other/2")
    store.reserve("me/task/3")
    assert store.steps("me/other/2") == [2]


def test_a_damaged_save_is_refused_by_name(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.save("me/task", 3, some_pieces())
    path = tmp_path / "me/task/step-3.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"step-3\.safetensors is damaged"):
        store.load("me/task", 3)


def test_a_partly_written_save_is_no_save(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.save("me/task", 3, some_pieces())
    (tmp_path / "me/task/.partial-step-5.safetensors").write_bytes(b"begun")
    assert store.steps("me/task") == [3]


def test_pieces_are_joined_to_whole_tensors() -> None:
    pieces = some_pieces()
    other = Piece("p", "value", (2, 9), torch.ones(2, 4, dtype=torch.float64), 1, ((0, 1), (4, 6), (8, 9)))
    whole = assemble([*pieces, other], "value")
    assert torch.equal(whole["a"], pieces[0].tensor)
    assert torch.equal(whole["p"][:, [1, 2, 3, 6, 7]], pieces[2].tensor)
    assert torch.equal(whole["p"][:, [0, 4, 5, 8]], other.tensor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runs": [[5, 12]]}, "do not lie within"),
        ({"runs": [[4, 1]]}, "do not lie within"),
        ({"dim": 3}, "do not lie within"),
        ({"shape": [2, 10**12]}, "shape"),
        ({"kind": "moment"}, "kind"),
        ({"runs": [[0, 3]]}, "must be"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    index, tensors = to_index(some_pieces()), [piece.tensor for piece in some_pieces()]
    index[2] |= change
    with pytest.raises(UserError, match=said):
        from_index(index, tensors)


def test_runs_of_indices() -> None:
    assert runs_of(torch.tensor([1, 2, 3, 6, 7, 9])) == ((1, 4), (6, 8), (9, 10))
    assert runs_of(torch.tensor([], dtype=torch.int64)) == ()
