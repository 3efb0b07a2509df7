"""The simulator against closed forms, its own rules, and templates that must be refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import BucketCost, sizes_of
from megatron_mux.pipeline.check import TemplateError, check
from megatron_mux.pipeline.simulate import Simulation, simulate
from megatron_mux.pipeline.structured import StructuredRun, check_memory, descending, structured
from megatron_mux.pipeline.template import Template, forward_only, gpipe, interleaved, one_f_one_b, plain
from tests.unit.pipeline.idle import bubble_shares, internal_bubble

seconds = st.floats(0.1, 10.0)


@st.composite
def bucket_sets(draw: st.DrawFn) -> list[BucketCost]:
    stages = draw(st.integers(1, 4))
    return [
        BucketCost(
            micro_batches=draw(st.integers(1, 4)),
            forward=tuple(draw(st.lists(seconds, min_size=stages, max_size=stages))),
            backward=tuple(draw(st.lists(seconds, min_size=stages, max_size=stages))),
            chunks=draw(st.integers(1, 3)),
            memory=tuple(draw(st.lists(st.floats(0.0, 5.0), min_size=stages, max_size=stages))),
            transfer=tuple(draw(st.lists(st.floats(0.0, 2.0), min_size=stages - 1, max_size=stages - 1))),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


def equal(stages: int, count: int, forward: float = 2.0, backward: float = 3.0) -> list[BucketCost]:
    return [BucketCost(count, (forward,) * stages, (backward,) * stages, memory=(1.0,) * stages)]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [4, 8])
def test_closed_forms(stages: int, count: int) -> None:
    buckets = equal(stages, count)
    for template in (gpipe(stages, plain([count])), one_f_one_b(stages, plain([count]))):
        found = simulate(template, buckets)
        assert found.latency == pytest.approx((count + stages - 1) * 5.0)
        assert bubble_shares(found)[0] == pytest.approx((stages - 1) / (count + stages - 1))
    assert simulate(gpipe(stages, plain([count])), buckets).peaks[0] == count
    assert simulate(one_f_one_b(stages, plain([count])), buckets).peaks[0] == min(stages, count)


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_divides_the_bubble(ranks: int, virtual: int) -> None:
    count = 4 * ranks
    buckets = equal(ranks * virtual, count, 2.0, 2.0)
    found = simulate(interleaved(ranks, virtual, plain([count])), buckets)
    # Narayanan et al., 2021: (ranks - 1) (forward + backward) of a stage that is 1 / virtual of a rank's layers.
    assert found.latency == pytest.approx(count * virtual * 4.0 + (ranks - 1) * 4.0)


def assert_rules(found: Simulation, buckets: list[BucketCost], stages: int) -> None:
    when = {t.action: t for actions in found.timed for t in actions}
    for actions in found.timed:
        for i, timed in enumerate(actions):
            action, bucket = timed.action, buckets[timed.action.bucket]
            source = action.stage + (-1 if action.kind == "F" else 1)
            free = actions[i - 1].stop if i else 0.0
            ready = 0.0
            if 0 <= source < stages:
                theirs = when[Action.of(source, action.kind, action.chunk_id)]
                ready = theirs.stop + bucket.transfer[min(source, action.stage)]
            assert timed.start >= max(free, ready) - 1e-9
            assert timed.stop - timed.start == pytest.approx(bucket.seconds(action))
            if timed.start > free + 1e-9 and not bucket.transfer:
                assert timed.start == pytest.approx(ready), "it idles for its input only"


@given(bucket_sets())
def test_every_template_keeps_the_rules(buckets: list[BucketCost]) -> None:
    stages, of = buckets[0].stages, sizes_of(buckets)
    for template in (gpipe(stages, of), one_f_one_b(stages, of), structured(buckets)):
        assert_rules(simulate(template, buckets), buckets, stages)


@given(bucket_sets())
def test_the_template_knows_its_latency(buckets: list[BucketCost]) -> None:
    run = StructuredRun(buckets)
    template, latency = run.template(), run.latency
    assert latency == pytest.approx(simulate(template, buckets).latency)


@given(bucket_sets(), st.floats(1.0, 3.0))
def test_structured_keeps_to_the_memory_it_is_given(buckets: list[BucketCost], room: float) -> None:
    stages = buckets[0].stages
    limit = [room * max(b.memory[s] * b.chunks for b in buckets) for s in range(stages)]
    found = simulate(structured(buckets, limit), buckets)
    assert all(found.peaks[s] <= limit[s] * (1 + 1e-6) for s in range(stages))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 8),
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 6)), min_size=1, max_size=8),
)
def test_the_last_stage_never_idles_inside(stages: int, of: list[tuple[float, int]]) -> None:
    # MuxTune appendix A, theorem 2: descending order, F = B, equal stages, no transfer time, memory to spare.
    buckets = [BucketCost(count, (time,) * stages, (time,) * stages) for time, count in of]
    buckets = [buckets[i] for i in descending(buckets)]
    found = simulate(structured(buckets), buckets)
    assert internal_bubble(found, stages - 1) == pytest.approx(0.0, abs=1e-6)
    steady = sum(2 * b.micro_batches * b.forward[0] for b in buckets)
    ends = (stages - 1) * (buckets[0].forward[0] + buckets[-1].forward[0])
    # Lemma 1 counts the drain as (S - 1) passes of the last bucket. That is a bound: earlier stages may still be busy
    # with a longer bucket's backward when the last one's gradient arrives.
    assert found.latency >= steady + ends - 1e-6


def test_one_micro_batch_that_does_not_fit_is_refused() -> None:
    buckets = [BucketCost(2, (1.0,), (1.0,), memory=(3.0,), chunks=2)]
    with pytest.raises(ValueError, match="bucket 0 keeps 6 bytes on rank 0, which may keep 5"):
        check_memory(buckets, [5.0])
    assert simulate(structured(buckets, [5.0]), buckets).peaks == (6.0,), "it is in flight alone"


def parsed(*rows: str) -> Template:
    return tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("0F0.0 0F0.1 0B0.0", "1F0.0 1B0.0 1F0.1 1B0.1"), "0B0.1 is missing"),
        (("0F0.0 0F0.0 0B0.0", "1F0.0 1B0.0"), r"0F0\.0 is there twice[\s\S]*>0F0\.0<"),
        (("0F0.0 1F0.1 0B0.0", "1F0.0 1B0.0"), r"1F0\.1 is not for a stage of rank 0"),
        (("0F0.7", "1F0.0"), "that no bucket has"),
        (("0F0.0 0F0.1 0B0.0 0B0.1", "1F0.1 1B0.1 1F0.0 1B0.0"), "order their transfers differently"),
        (("0B0.0 0F0.0 0F0.1 0B0.1", "1F0.0 1B0.0 1F0.1 1B0.1"), "before the forward of its last chunk"),
        (("0F0.0 0B0.0 0F0.1 0B0.1", "1F0.0 1F0.1 1B0.0 1B0.1"), r"deadlock[\s\S]*>0B0\.0<[\s\S]*>1F0\.1<"),
    ],
)
def test_what_cannot_be_run_is_refused(rows: tuple[str, ...], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        simulate(parsed(*rows), equal(2, 2))


@pytest.mark.parametrize(
    "row", ["0F0.0.1 0F0.0 0B0.0.1 0B0.0", "0F0.0 0F0.0.1 0B0.0 0B0.0.1"], ids=["forward", "backward"]
)
def test_chunks_out_of_order_are_refused(row: str) -> None:
    with pytest.raises(TemplateError, match=r"comes before chunk \d of its micro-batch"):
        check(parsed(row), [[2]], stages=1)


def test_forward_passes_alone_are_a_template() -> None:
    assert simulate(forward_only(2, 3), equal(2, 3)).latency == pytest.approx(8.0)


def test_costs_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of stages"):
        BucketCost(1, (1.0, 1.0), (1.0,))
    with pytest.raises(ValueError, match="negative"):
        BucketCost(1, (1.0,), (-1.0,))
    with pytest.raises(ValueError, match=r"for \[1, 2\] stages"):
        structured([BucketCost(1, (1.0,), (1.0,)), BucketCost(1, (1.0, 1.0), (1.0, 1.0))])
