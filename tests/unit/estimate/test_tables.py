"""Tables are kept by group: a task that joins has only its own made, and what is not whole is made anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.estimate import tables
from megatron_mux.estimate.rehearsal import SHALLOW
from megatron_mux.estimate.solve import stage_table
from megatron_mux.estimate.tables import Tables
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group
from megatron_mux.tasks import TaskSpec
from tests.unit.estimate.played import CHUNK, CONFIG, SIGNATURES, base, played, signature


@pytest.fixture
def ran() -> list[int]:
    """The stages that have been rehearsed."""
    return []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> list[Group]:
    """The groups that have been rehearsed."""
    found: list[Group] = []

    def rehearsed(
        self: Tables,
        groups: Sequence[Group],
        stages: Sequence[int],
        signatures: Sequence[Signature],
        alike: bool,
    ) -> Any:
        found.extend(groups)
        ran.extend(stages)
        own = played([(0,), (1,), (0, 1)], SHALLOW, lambda rows: int(2 * rows))
        whole = stage_table(own, own, (SHALLOW, SHALLOW), CHUNK)
        return [(group, stage, tables._entry(whole, group)) for group in groups for stage in stages]

    monkeypatch.setattr(Tables, "_rehearsed", rehearsed)
    return found


def test_only_what_is_new_is_rehearsed(tmp_path: Path, made: list[Group]) -> None:
    first = Tables(base(), tmp_path).memory(SIGNATURES[:1])
    assert made == [(0,)]
    second = Tables(base(), tmp_path).memory(SIGNATURES)
    assert made == [(0,), (1,), (0, 1)]
    assert second.persistent(np.array([1.0, 0.0])) == pytest.approx(first.persistent(np.ones(1)))
    again = Tables(base(), tmp_path).memory(SIGNATURES)
    assert len(made) == 3 and again.persistent(np.ones(2)) == second.persistent(np.ones(2))


@pytest.mark.parametrize(
    ("residence", "tensor", "data", "sends"),
    [
        ("resident", 1, 2, True),
        ("resident", 2, 1, False),
        ("sharded", 1, 1, True),
        ("sharded", 1, 2, False),
        ("sharded-offloaded", 1, 2, False),
        ("offloaded", 1, 2, True),
    ],
)
def test_zeros_are_sent_where_no_rank_waits_for_others_in_a_pass(
    tmp_path: Path, made: list[Group], residence: Kind, tensor: int, data: int, sends: bool
) -> None:
    """As `engine.out_of_memory.ranks_meet`."""
    run = base()
    run = replace(run, residence=residence, tensor=tensor, plan=replace(run.plan, data=data))
    assert Tables(run, tmp_path).memory(SIGNATURES[:1]).sends_zeros == sends


def test_other_runs_have_tables_of_their_own(tmp_path: Path, made: list[Group]) -> None:
    for run in (base(), replace(base(), recompute="full"), replace(base(), dtype="float32")):
        Tables(run, tmp_path).memory(SIGNATURES[:1])
    assert made == [(0,)] * 3
    Tables(replace(base(), steps=9), tmp_path).memory(SIGNATURES[:1])
    assert len(made) == 3


def test_pipelines_share_their_ends_and_all_that_are_alike(
    tmp_path: Path, made: list[Group], ran: list[int]
) -> None:
    def asks(stages: int, data: int = 1, **more: Any) -> list[int]:
        before = len(ran)
        plan = replace(base().plan, stages=stages, data=data)
        Tables(
            replace(base(), plan=plan, config={**CONFIG, "num_hidden_layers": 24}, **more), tmp_path
        ).memory(SIGNATURES[:1])
        return ran[before:]

    assert asks(2) == [0, 2] and asks(3) == [1] and asks(4) == []
    assert asks(2) == asks(3) == [] and asks(1) == [0]
    assert asks(1, 2) == asks(1, 4) == []
    assert asks(1, 2, residence="sharded") == [0] == asks(1, 4, residence="sharded")


def test_a_file_that_is_not_whole_is_made_anew(tmp_path: Path, made: list[Group]) -> None:
    memory = Tables(base(), tmp_path).memory(SIGNATURES[:1])
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:50])
    again = Tables(base(), tmp_path).memory(SIGNATURES[:1])
    assert len(made) == 2 and again.persistent(np.ones(1)) == memory.persistent(np.ones(1))


def test_messages_have_rows_of_references_unless_those_are_computed_before(
    tmp_path: Path, made: list[Group]
) -> None:
    for training, refers in (
        ({"loss": "orpo"}, []),
        ({"loss": "dpo"}, [1]),
        ({"loss": "dpo", "precompute_ref_log_probs": True}, []),
        ({"loss": "kto"}, [1]),
        ({"loss": "kto", "precompute_ref_log_probs": True}, []),
    ):
        both = [signature(), signature(training)]
        assert Tables(base(), tmp_path).memory(both).referring == refers


@pytest.mark.parametrize(
    ("adapter", "alike"),
    [({}, True), ({"layers_to_transform": [1, 2]}, False), ({"use_dora": True}, True)],
)
def test_all_layers_are_run_where_adapters_differ(adapter: dict[str, Any], alike: bool) -> None:
    assert Tables(base())._are_alike([spec_of(signature(**adapter))]) == alike


def test_all_layers_are_run_where_the_backbone_differs_or_is_shallow() -> None:
    config = {**base().config, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64}
    shallow = {**base().config, "num_hidden_layers": 3}
    for own in (config, shallow):
        assert not Tables(replace(base(), config=own))._are_alike([spec_of(signature())])


def test_a_pair_by_itself_is_rehearsed_beside_one_of_its_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def rehearsal(run: Any, signatures: Any, groups: Sequence[Group], *_: Any, **__: Any) -> None:
        raise Asked(list(groups))

    monkeypatch.setattr(tables, "rehearsal", rehearsal)
    for asked, run in (([(0, 1)], [(0,), (0, 1)]), ([(1,), (0, 1)], [(1,), (0, 1)])):
        with pytest.raises(Asked) as found:
            list(Tables(base())._rehearsed(asked, [0], SIGNATURES, True))
        assert found.value.args == (run,)


def spec_of(own: Signature) -> TaskSpec:
    return TaskSpec.model_validate(own.task)
