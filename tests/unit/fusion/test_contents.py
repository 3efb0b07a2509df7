"""What chunks contain: rows and labels by signature, copies, and how a CPU's attention computes them."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mux.footprint.content import ATTENTION, Contents
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.step import Lengths
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding

LONG = LONGEST + 88
LENGTHS = {"a": Lengths((40, 100, LONG, LONG), (10, 100, 50, 0)), "p": Lengths((30,), (30,))}
A, P = 0, 1


def of(*pieces: Slice, device: str = "cpu") -> Contents:
    return contents_of([pieces], LENGTHS, {"a": A, "p": P}, 2, device, {"p"})


def whole(sequence: int, task: str = "a") -> Slice:
    return Slice(task, sequence, 0, LENGTHS[task].tokens[sequence])


def test_rows_labels_and_copies_are_those_of_the_pieces() -> None:
    found = of(whole(0), Slice("a", 2, 500, 580), whole(0, "p"))
    assert found.rows.tolist() == [[120.0, 30.0]]
    assert found.labels.tolist() == [[10.0 + 30.0, 30.0]]  # a sequence's last 50 tokens have labels
    assert found.sequences.tolist() == [3.0]
    assert found.copied.tolist() == [500.0 + 80.0]  # its past, and what it leaves for what comes


@pytest.mark.parametrize(
    ("pieces", "short", "long", "joined", "masked"),
    [
        ((whole(0), whole(1)), (40, 100), 0, False, 0),
        ((whole(2),), (), LONG, False, 0),
        ((whole(2), whole(3)), (), 2 * LONG, False, 0),  # of one length: one call
        ((whole(0), whole(2)), (40,), LONG, True, 0),
        ((whole(0), whole(0, "p")), (40,), 30, True, 30 * 30),  # a prefix comes before short ones, too
        (
            (Slice("a", 2, 0, 300), Slice("a", 3, 300, 600)),
            (300,),
            300,
            True,
            300 * 600,
        ),  # and so does a past
    ],
)
def test_a_cpu_pads_short_sequences_and_joins_what_several_calls_compute(
    pieces: tuple[Slice, ...], short: tuple[int, ...], long: int, joined: bool, masked: int
) -> None:
    total = sum(short) + long
    expected = [*pairs_and_padding(short), long, total * joined, long * joined, masked]
    assert of(*pieces).attention.tolist() == [expected]
    assert np.array_equal(of(*pieces, device="cuda").attention, np.zeros((1, len(ATTENTION))))
