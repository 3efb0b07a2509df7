"""The step of a task file: shared out by hand, and in the fewest micro-batches that fit, against trying all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.choice.engine_step import step_memory
from megatron_mux.choice.fit import Fit, Fitting
from megatron_mux.choice.flags import flags
from megatron_mux.choice.ranking import rank
from megatron_mux.choice.task_file import Content, FileStep
from megatron_mux.fusion.device import device_of
from megatron_mux.gpus import known
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.sizes import MIB
from tests.unit.choice.tables_by_hand import TablesByHand
from tests.unit.memory.architectures import at_stage, llama, lora

ARCHITECTURE = llama(8)
LONG = replace(lora(ARCHITECTURE, 8, "long"), sequences=3)
SHORT = replace(lora(ARCHITECTURE, 64, "short"), sequences=6, length=64)
A100 = device_of("cuda", "A100", 0)
RECIPE = Recipe(128, adapters=(LONG, SHORT))
TABLES = TablesByHand(ARCHITECTURE, RECIPE)
STEP = FileStep((LONG, SHORT))


def fit(recipe: Recipe, memory: int, method: ParallelConfig) -> Fit:
    return Fitting(ARCHITECTURE, recipe, memory, A100, tables=TablesByHand(ARCHITECTURE, recipe))(method)


def contents(*found: dict[str, int]) -> tuple[Content, ...]:
    """Micro-batches by their numbers of sequences."""
    return tuple(map(Content, found))


def test_shared_out_by_hand() -> None:
    assert STEP.tokens == 768
    whole = STEP.divided(1, 1)
    assert whole.worst_cases == contents({"long": 3, "short": 6})
    assert (whole.micro_batches, whole.rows) == (1, 768)
    # 128 each to three; then 64 to each of them, twice.
    assert STEP.divided(1, 3).worst_cases == contents({"long": 1, "short": 2})
    # Two pipelines: 128+128, 128, then short ones where there is less: 384 each.
    two = STEP.divided(2, 1)
    assert two.rows == 384
    assert set(map(str, two.worst_cases)) == set(
        map(str, contents({"long": 2, "short": 2}, {"long": 1, "short": 4}))
    )
    # Each sequence by itself; a tenth micro-batch has nothing.
    alone = STEP.divided(1, 10)
    assert alone.micro_batches == 9 and alone.worst_cases == contents({"long": 1}, {"short": 1})
    assert STEP.most(1) == 9 and STEP.most(2) == 5 and STEP.most(16) == 1


def test_records_of_pairs_are_not_divided() -> None:
    """As the engine keeps them: in one pipeline, and in one micro-batch."""
    step = FileStep((replace(SHORT, sequences=6, together=2),))
    assert step.most(1) == 3 and step.most(2) == 2
    assert step.divided(1, 8).worst_cases == contents({"short": 2}) and step.divided(1, 8).micro_batches == 3
    one = FileStep((replace(SHORT, sequences=2, together=2),)).divided(2, 1)
    assert one.worst_cases == contents({"short": 2}) and one.rows == 2 * 64


def test_a_task_adds_what_its_own_rows_keep() -> None:
    """A micro-batch of one task's sequences is that task's alone, but for what stands there anyway."""
    (both,) = STEP.divided(1, 1).worst_cases
    mixed = STEP.mix(both, RECIPE)
    assert mixed.shares == (0.5, 0.5)
    assert mixed.mean_length == 96
    of = {
        name: replace(RECIPE, mix=STEP.mix(content, RECIPE).mix)
        for name in ("long", "short")
        for content in contents({name: 4})
    }
    peaks = {
        name: at_stage(step_memory(ARCHITECTURE, recipe, ParallelConfig(), tables=TABLES), 0, 256)
        for name, recipe in of.items()
    }
    more = peaks["short"]["activations"] - peaks["long"]["activations"]
    assert more == (2 - 1) * 256, "a byte more for each row of the second task's table"


SIZES = st.tuples(st.integers(1, 9), st.sampled_from([32, 64, 100, 128]))


@given(SIZES, SIZES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 40))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_fewest_micro_batches_that_fit(
    one: tuple[int, int], other: tuple[int, int], data: int, pipeline: int, extra: int
) -> None:
    adapters = (
        replace(LONG, sequences=one[0], length=one[1]),
        replace(SHORT, sequences=other[0], length=other[1]),
    )
    step = FileStep(adapters)
    method = ParallelConfig(data=data, pipeline=pipeline)
    recipe = replace(RECIPE, adapters=adapters)
    tables = TablesByHand(ARCHITECTURE, recipe)

    def peak(count: int) -> int:
        division = step.divided(data, count)
        own = replace(method, parts=count)
        return max(
            step_memory(
                ARCHITECTURE, step.mix(content, recipe), own, tables=tables, gpu=known("A100").gpu
            ).peak(step.rows(content))
            for content in division.worst_cases
        )

    least = min(method.micro_batches, step.most(data))
    counts = range(least, step.most(data) + 1)
    memory = peak(counts[-1]) + extra * MIB // 2
    found = fit(recipe, memory, method)
    assert found.fits and found.method.parts == next(n for n in counts if peak(n) <= memory)
    assert found.memory.peak(found.rows) == peak(found.method.micro_batches)
    assert found.largest >= found.sequences
    assert found.tokens == step.tokens
    assert data * found.mean_rows * found.micro_batches >= step.tokens
    none = fit(recipe, min(map(peak, counts)) - 1, method)
    assert not none.fits and none.method.parts == counts[-1]


def test_data_parallel_ranks_divide_a_step() -> None:
    """Twice as many sequences are no larger micro-batch: there are more of them, so that they fit."""
    memory = 1100 * MIB
    twice = tuple(replace(task, sequences=2 * task.sequences) for task in STEP.tasks)
    one, two = (
        rank(ARCHITECTURE, recipe, 2, memory, A100, tables=TablesByHand(ARCHITECTURE, recipe))
        for recipe in (replace(RECIPE, adapters=tasks) for tasks in (STEP.tasks, twice))
    )
    assert one.chosen is not None and two.chosen is not None
    assert one.chosen.tokens * 2 == two.chosen.tokens == 2 * 768
    for entry in (*one.entries, *two.entries):
        words = flags(entry.method, RECIPE)
        assert words[words.index("--mux-micro-batches") + 1] == str(entry.method.micro_batches)
        if entry.fits:
            assert entry.peak_process <= memory


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_micro_batches_than_sequences(count: int) -> None:
    few = replace(RECIPE, adapters=(replace(LONG, sequences=count),))
    found = fit(few, 1 << 40, ParallelConfig(pipeline=4))
    assert found.method.micro_batches == count == found.micro_batches and found.fits
