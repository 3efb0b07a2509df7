"""The step of a task file: shared out by hand, and in the fewest micro-batches that fit, against trying all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.choice.fit import of_file
from megatron_mux.choice.flags import flags
from megatron_mux.choice.ranking import rank
from megatron_mux.choice.recipes import gpu
from megatron_mux.choice.step import Content, FileStep, TaskBatch
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import step_memory
from megatron_mux.memory.sizes import MIB
from tests.unit.memory.architectures import llama, lora

ARCHITECTURE = llama(8)
LONG, SHORT = lora(ARCHITECTURE, 8, "long"), lora(ARCHITECTURE, 64, "short")
RECIPE = Recipe(128, adapters=(LONG, SHORT))
STEP = FileStep((TaskBatch("long", 3, 128), TaskBatch("short", 6, 64)))


def contents(*found: dict[str, int]) -> tuple[Content, ...]:
    """Micro-batches by their numbers of sequences."""
    lengths = {"long": 128, "short": 64}
    return tuple(Content(one, {name: count * lengths[name] for name, count in one.items()}) for one in found)


def test_shared_out_by_hand() -> None:
    assert STEP.tokens == 768 and STEP.longest == 128
    whole = STEP.divided(1, 1)
    assert whole.heaviest == contents({"long": 3, "short": 6})
    assert (whole.micro_batches, whole.rows) == (1, 768)
    # 128 each to three; then 64 to each of them, twice.
    assert STEP.divided(1, 3).heaviest == contents({"long": 1, "short": 2})
    # Two pipelines: 128+128, 128, then short ones where there is less: 384 each.
    two = STEP.divided(2, 1)
    assert two.rows == 384
    assert set(map(str, two.heaviest)) == set(
        map(str, contents({"long": 2, "short": 2}, {"long": 1, "short": 4}))
    )
    # Each sequence by itself; a tenth micro-batch has nothing.
    alone = STEP.divided(1, 10)
    assert alone.micro_batches == 9 and alone.heaviest == contents({"long": 1}, {"short": 1})
    assert STEP.most(1) == 9 and STEP.most(2) == 5 and STEP.most(16) == 1


def test_a_task_adds_what_its_own_rows_keep() -> None:
    """A micro-batch of one task's sequences is that task's alone, but for what stands there anyway."""
    (both,) = STEP.divided(1, 1).heaviest
    mixed = STEP.mix(both, RECIPE)
    assert [(p.share, p.length) for p in mixed.portions] == [(0.5, 128), (0.5, 64)]
    assert mixed.mean_length == 96
    of = {
        name: replace(RECIPE, mix=STEP.mix(content, RECIPE).mix)
        for name in ("long", "short")
        for content in contents({name: 4})
    }
    peaks = {
        name: step_memory(ARCHITECTURE, recipe, Method()).at(0, 256).breakdown for name, recipe in of.items()
    }
    more = peaks["short"]["activations"] - peaks["long"]["activations"]
    # In each of eight layers, in bf16: a low-rank product for each row, and the factors of the task that is there.
    assert more == 8 * (2 * 64 - 2 * 8) * (256 + 256 + 512) * 2


TASKS = st.builds(TaskBatch, st.just("task"), st.integers(1, 9), st.sampled_from([32, 64, 100, 128]))


@given(TASKS, TASKS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 40))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_fewest_micro_batches_that_fit(
    one: TaskBatch, other: TaskBatch, data: int, pipeline: int, extra: int
) -> None:
    step = FileStep((replace(one, name="long"), replace(other, name="short")))
    method = Method(data=data, pipeline=pipeline)
    recipe = replace(RECIPE, length=step.longest)

    def peak(count: int) -> int:
        division = step.divided(data, count)
        own = replace(method, parts=count)
        return max(
            step_memory(ARCHITECTURE, step.mix(content, recipe), own).peak(content.total)
            for content in division.heaviest
        )

    least = min(method.micro_batches, step.most(data))
    counts = range(least, step.most(data) + 1)
    memory = peak(counts[-1]) + extra * MIB // 2
    found = of_file(ARCHITECTURE, recipe, method, memory, step)
    assert found.fits and found.method.parts == next(n for n in counts if peak(n) <= memory)
    assert found.memory.peak(found.rows) == peak(found.method.micro_batches)
    assert found.largest >= found.sequences
    assert found.work.tokens == step.tokens
    assert data * found.work.rows * found.work.micro_batches >= step.tokens
    none = of_file(ARCHITECTURE, recipe, method, min(map(peak, counts)) - 1, step)
    assert not none.fits and none.method.parts == counts[-1]


def test_data_parallel_ranks_divide_a_step() -> None:
    """Twice as many sequences are no larger micro-batch: there are more of them, so that they fit."""
    memory = 1100 * MIB
    twice = FileStep(tuple(replace(task, sequences=2 * task.sequences) for task in STEP.tasks))
    one, two = (rank(ARCHITECTURE, RECIPE, 2, memory, gpu("A100"), step=s) for s in (STEP, twice))
    assert one.chosen is not None and two.chosen is not None
    assert one.chosen.speed.tokens * 2 == two.chosen.speed.tokens == 2 * 768
    for entry in (*one.entries, *two.entries):
        words = flags(entry.method, RECIPE)
        assert words[words.index("--mux-micro-batches") + 1] == str(entry.method.micro_batches)
        if entry.fits:
            assert entry.peak_process <= memory


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_micro_batches_than_sequences(count: int) -> None:
    few = FileStep((TaskBatch("long", count, 128),))
    found = of_file(ARCHITECTURE, replace(RECIPE, adapters=(LONG,)), Method(pipeline=4), 1 << 40, few)
    assert found.method.micro_batches == count == found.work.micro_batches and found.fits
