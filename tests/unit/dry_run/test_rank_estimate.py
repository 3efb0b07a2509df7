"""From a recording to a rank's answer: by hand, and what is kept."""

from __future__ import annotations

import pytest

from megatron_mux.dry_run.rank_estimate import estimate_rank, worst
from megatron_mux.dry_run.run_spec import STEP, Recording, RunSpec
from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory import untraced
from megatron_mux.memory.sizes import GIB, MIB
from megatron_mux.memory.stream.events import Category, Moment, StreamBuilder

SETTING = RunSpec({"model_type": "llama"}, [], plan_for("spatial", {"a": 1}, 2), tensor=2)


def _recording() -> Recording:
    """40 MiB of weights; a product in each pass, the backward's 100 MiB."""
    builder = StreamBuilder()
    builder.allocate(40 * MIB, Moment("load", 0, "empty"), category=Category.PARAMETERS)
    kept = builder.allocate(60 * MIB, Moment("forward", 0, "mm"), category=Category.ACTIVATIONS)
    made = builder.allocate(100 * MIB, Moment("backward", 0, "mm"), category=Category.ACTIVATIONS)
    builder.free(kept, Moment("backward", 0))
    builder.free(made, Moment("backward", 0))
    again = builder.allocate(20 * MIB, Moment("optimizer", 0, "mm"), category=Category.WORKSPACE)
    builder.free(again, Moment("optimizer"))
    marks = ((1, STEP), (1, "1F0.0"), (2, "1B0.0"), (3, "1B0.1"), (5, "1N0"))
    return Recording(builder.done(), marks, 3)


def test_an_answer_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = estimate_rank(_recording(), SETTING, 2, 80 * GIB)
    prediction = found.prediction
    operators = [event.moment.operator for event in prediction.stream]
    assert operators.count(untraced.CUBLAS) == 2
    # A workspace for the main thread and one for autograd's, which has not begun when most is allocated.
    live = (40 + 60 + 32 + 100) * MIB
    assert (found.rank, found.stage, found.fits, prediction.communicators) == (2, 1, True, 3)
    assert prediction.breakdown["parameters"] == 40 * MIB
    outside = untraced.CONTEXT_BYTES + 3 * untraced.COMMUNICATOR_BYTES
    assert prediction.process == prediction.peak_reserved + outside == sum(prediction.breakdown.values())
    assert prediction.peak_allocated == live + 32 * MIB
    assert found.action == "1B0.0" and found.when.endswith("(1B0.0)") and "backward" in prediction.moment
    least, most = prediction.interval
    assert least < prediction.process < most


def test_whether_it_fits_is_to_the_byte_of_what_is_reserved() -> None:
    recording = _recording()
    enough = estimate_rank(recording, SETTING, 0, 80 * GIB).prediction
    outside = enough.process - enough.peak_reserved
    assert estimate_rank(recording, SETTING, 0, outside + enough.peak_allocated + 20 * MIB).fits
    assert not estimate_rank(recording, SETTING, 0, outside + enough.peak_allocated - 1).fits
    assert not estimate_rank(recording, SETTING, 0, outside // 2).fits


def test_the_worst_rank_is_one_that_does_not_fit() -> None:
    fits, lacks = (
        estimate_rank(_recording(), SETTING, 0, GIB * 80),
        estimate_rank(_recording(), SETTING, 1, MIB),
    )
    assert worst([fits, lacks]) is lacks
