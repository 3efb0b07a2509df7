"""An evaluation holds a few records at a time and comes to what it would with all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine
from megatron_mux.engine.evaluation import evaluator
from megatron_mux.engine.evaluation.held_out import HeldOut
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from tests.budget import failing
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.harness import engine_logits
from tests.end_to_end.held_out import COUNT, classified, evaluated, make_case, plain

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(("kind", "choices"), [("prefix", 0), ("lora", 3)])
def test_a_few_records_at_a_time_give_the_same(
    kind: str,
    choices: int,
    backbone_of: BackboneOf,
    path_of: PathOf,
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone, case = backbone_of("llama", torch.float64), make_case(kind, path_of("llama"))
    records = classified(choices) if choices else plain()
    at_once = evaluated(backbone, parallel, case, records)
    sequences = COUNT * max(choices, 1)
    assert records.most == sequences, "one group of them all"
    records.most = 0
    monkeypatch.setattr(evaluator, "TOKENS_PER_PASS", 40)
    monkeypatch.setattr(evaluator, "PASSES_PER_STAGE", 2)
    in_groups = evaluated(backbone, parallel, case, records)
    assert records.most <= sequences / 3, f"{records.most} sequences were in use at once"
    assert in_groups.records == at_once.records == COUNT
    assert in_groups.loss == pytest.approx(at_once.loss, rel=1e-12)
    assert in_groups.accuracy == at_once.accuracy
    order = list(reversed(range(COUNT)))
    records.pairs = [records.pairs[i] for i in order]
    if not choices:  # the place of a record decides which candidate is its own
        assert evaluated(backbone, parallel, case, records).loss == pytest.approx(at_once.loss, rel=1e-12)


@pytest.mark.parametrize("choices", [0, 3])
def test_loss_and_accuracy_are_what_they_are_said_to_be(
    choices: int, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone, case = backbone_of("llama", torch.float64), make_case("lora", path_of("llama"))
    records = classified(choices) if choices else plain()
    found = evaluated(backbone, parallel, case, records)
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task])
    nll = labels = right = counted = 0.0
    for index in range(COUNT):
        pairs = records.candidates_of[index] if choices else [records.pairs[index]]
        own = index % len(pairs)
        sums = []
        for i, (logits, (tokens, labelled)) in enumerate(
            zip(engine_logits(engine, case, pairs), pairs, strict=True)
        ):
            rows, wanted = logits[:-1][labelled[1:]].double(), tokens[1:][labelled[1:]]
            sums.append(float(F.cross_entropy(rows, wanted, reduction="sum")))
            if i == own:
                nll, labels = nll + sums[-1], labels + len(wanted)
                right += 0 if choices else int(((rows.argmax(1) == wanted) & (wanted != 7)).sum())
                counted += 1 if choices else int((wanted != 7).sum())
        right += choices > 0 and sums.index(min(sums)) == own
    engine.remove_task("task")
    assert found.loss == pytest.approx(nll / labels, rel=1e-7)
    assert found.accuracy == pytest.approx(right / counted)
    assert not choices or 0 < right < COUNT


@pytest.mark.parametrize("choices", [0, 3])
def test_passes_that_find_no_memory_are_cut_until_they_do(
    choices: int, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone, case = backbone_of("llama", torch.float64), make_case("lora", path_of("llama"))
    records = classified(choices) if choices else plain()
    undisturbed = evaluated(backbone, parallel, case, records)
    longest = max(len(tokens) for pairs in records.candidates_of or [records.pairs] for tokens, _ in pairs)
    rows: list[int] = []

    def lacks(batch: PackedBatch) -> bool:
        rows.append(batch.rows)
        return batch.rows > longest

    with failing([backbone], lacks):
        found = evaluated(backbone, parallel, case, records)
    assert rows[0] > longest and rows.count(rows[0]) == 1, "no pass is tried again as it was"
    assert found.loss == pytest.approx(undisturbed.loss, rel=1e-12)
    assert (found.accuracy, found.records) == (undisturbed.accuracy, undisturbed.records)


def test_where_one_sequence_finds_no_memory_that_is_said_and_training_goes_on(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone, case = backbone_of("llama", torch.float64), make_case("lora", path_of("llama"))
    engine, task = Engine(backbone, parallel), case.task
    task.evaluation = plain().as_dataset()
    engine.register_tasks([task])
    said = r"one sequence alone ran out of memory \(rank 0 at 0F"
    with failing([backbone], lambda batch: True), pytest.raises(UserError, match=said):
        engine.evaluate("task")
    assert engine.step()["task"].step == 1
    engine.remove_task("task")


def test_the_batch_size_bounds_a_pass_and_a_group(
    backbone_of: BackboneOf,
    path_of: PathOf,
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone, case, batch_size = backbone_of("llama", torch.float64), make_case("lora", path_of("llama")), 3
    records = plain()
    wanted = evaluated(backbone, parallel, case, records)
    records.most = 0
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task])
    monkeypatch.setattr(HeldOut, "batch_size", batch_size)
    found = engine.evaluate("task", records.as_dataset())
    engine.remove_task("task")
    assert records.most <= 2 * batch_size * evaluator.PASSES_PER_STAGE
    assert found is not None and found.accuracy == wanted.accuracy
    assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
