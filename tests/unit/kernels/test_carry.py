"""Attention of sequences cut into chunks, forward in order and backward in reverse, equals the uncut one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.kernels.attention.segments import Segment, segment_attention

HEADS, SIZE = 4, 8
LAYERS = (0, 3)
MOST_CHUNKS = 8


@dataclass(frozen=True)
class Cut:
    """Where sequences are cut.

    Attributes:
        first: For each sequence, the chunk in which it begins.
        parts: For each sequence, the tokens that one chunk after the other holds.
        padding: Rows at the end of each chunk.
    """

    first: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    padding: int = 0

    @property
    def lengths(self) -> list[int]:
        return [sum(own) for own in self.parts]

    @property
    def whole(self) -> list[Segment]:
        starts = [sum(self.lengths[:i]) for i in range(len(self.parts))]
        return [
            Segment("ab"[i], start, n, 7)
            for i, (start, n) in enumerate(zip(starts, self.lengths, strict=True))
        ]

    @property
    def chunks(self) -> list[tuple[list[Segment], list[int]]]:
        """The segments of each chunk, and which rows of the uncut batch it holds."""
        found = []
        for clock in range(max(first + len(own) for first, own in zip(self.first, self.parts, strict=True))):
            segments: list[Segment] = []
            rows: list[int] = []
            for segment, first, own in zip(self.whole, self.first, self.parts, strict=True):
                if 0 <= clock - first < len(own):
                    past, count = sum(own[: clock - first]), own[clock - first]
                    goes_on = clock - first + 1 < len(own)
                    segments.append(Segment(segment.task, len(rows), count, 7, past, goes_on))
                    rows += range(segment.start + past, segment.start + past + count)
            found.append((segments, rows))
        return found


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """One or two sequences, in up to eight chunks."""
    count = draw(st.integers(1, 2))
    parts = [draw(st.lists(st.integers(1, 5), min_size=1, max_size=MOST_CHUNKS)) for _ in range(count)]
    longest = max(map(len, parts))
    first = [draw(st.integers(0, longest - len(own))) for own in parts]
    return Cut(tuple(first), tuple(map(tuple, parts)), draw(st.integers(0, 2)))


@dataclass
class Values:
    """What attention takes, for each layer, with what its output's gradient is."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    prefix: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, rows: int, groups: int, with_prefix: bool = False, dtype: torch.dtype = torch.float64
    ) -> Values:
        generator = torch.Generator().manual_seed(rows)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        shape = (len(LAYERS), rows)
        query, key, value = (drawn(*shape, heads, SIZE) for heads in (HEADS, groups, groups))
        pair = drawn(len(LAYERS), 3, groups, SIZE), drawn(len(LAYERS), 3, groups, SIZE)
        return cls(query, key, value, drawn(*shape, HEADS, SIZE), {"b": pair} if with_prefix else {})


Found = dict[str, Tensor]


def uncut(values: Values, cut: Cut, window: int | None = None) -> Found:
    leaves = [x.clone().requires_grad_() for x in (values.query, values.key, values.value)]
    query, key, value = leaves
    prefix = {
        task: (k.clone().requires_grad_(), v.clone().requires_grad_())
        for task, (k, v) in values.prefix.items()
    }
    outputs = []
    for i in range(len(LAYERS)):
        before = {task: (k[i], v[i]) for task, (k, v) in prefix.items()}
        outputs.append(
            segment_attention(query[i], key[i], value[i], cut.whole, scale=0.4, window=window, prefix=before)
        )
    out = torch.stack(outputs)
    out.backward(values.upstream)
    return _found(out, leaves, prefix)


def _found(out: Tensor, leaves: Sequence[Tensor], prefix: dict[str, tuple[Tensor, Tensor]]) -> Found:
    named = dict(zip(("query", "key", "value"), leaves, strict=True))
    for task, (k, v) in prefix.items():
        named |= {f"prefix key of {task}": k, f"prefix value of {task}": v}
    gradients = {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in named.items()}
    return {"output": out.detach(), **gradients}


Function = Callable[..., Tensor]


def plainly(function: Function, *args: Tensor) -> Tensor:
    return function(*args)


def recomputed(function: Function, *args: Tensor) -> Tensor:
    found: Tensor = checkpoint(function, *args, use_reentrant=False)
    return found


def recomputed_reentrant(function: Function, *args: Tensor) -> Tensor:
    found: Tensor = checkpoint(function, *args, use_reentrant=True)
    return found


@dataclass
class Chunked:
    """The chunks of a batch, pass by pass."""

    values: Values
    cut: Cut
    window: int | None = None
    carry: Carry = field(default_factory=Carry)
    how: Callable[..., Tensor] = plainly

    def __post_init__(self) -> None:
        self.leaves = [
            x.clone().requires_grad_() for x in (self.values.query, self.values.key, self.values.value)
        ]
        self.prefix = {
            task: (k.clone().requires_grad_(), v.clone().requires_grad_())
            for task, (k, v) in self.values.prefix.items()
        }
        self.outputs: list[Tensor] = []
        self.out = torch.zeros_like(self.values.upstream)

    def forward(self, number: int) -> None:
        segments, rows = self.cut.chunks[number]
        parts = [_padded(x[:, rows], self.cut.padding) for x in self.leaves]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            outputs = []
            for i, layer in enumerate(LAYERS):
                keys, values = self.carry.extend(layer, key[i], value[i], segments)
                before = {task: (k[i], v[i]) for task, (k, v) in self.prefix.items()}
                outputs.append(
                    segment_attention(
                        query[i], keys, values, segments, scale=0.4, window=self.window, prefix=before
                    )
                )
            return torch.stack(outputs)

        out = self.how(attend, *parts)
        self.out[:, rows] = out.detach()[:, : len(rows)]
        self.outputs.append(out)

    def backward(self, number: int) -> None:
        _, rows = self.cut.chunks[number]
        self.outputs[number].backward(_padded(self.values.upstream[:, rows], self.cut.padding))

    def run(self) -> Found:
        for number in range(len(self.cut.chunks)):
            self.forward(number)
        for number in reversed(range(len(self.cut.chunks))):
            self.backward(number)
        return _found(self.out, self.leaves, self.prefix)


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_full((x.shape[0], rows, *x.shape[2:]), 5.0)], dim=1)


def assert_same(found: Found, wanted: Found) -> None:
    assert found.keys() == wanted.keys()
    for name, ours in found.items():
        assert torch.allclose(ours, wanted[name], rtol=0.0, atol=1e-12), name


def assert_nothing_left(carry: Carry) -> None:
    assert not any(carry._left.values()) and not carry._gradients


@settings(max_examples=100, deadline=None)
@given(cuts(), st.sampled_from([HEADS, 2, 1]), st.none() | st.integers(1, 9), st.booleans())
def test_cut_sequences_equal_uncut_ones(cut: Cut, groups: int, window: int | None, with_prefix: bool) -> None:
    values = Values.of(sum(cut.lengths), groups, with_prefix)
    chunked = Chunked(values, cut, window)
    assert_same(chunked.run(), uncut(values, cut, window))
    assert_nothing_left(chunked.carry)


EIGHT = Cut((0, 2), ((3, 1, 4, 2, 5, 1, 3, 2), (2, 2, 1, 3)))


@pytest.mark.parametrize("how", [recomputed, recomputed_reentrant])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_recomputation_finds_what_it_found_and_leaves_nothing_twice(
    how: Callable[..., Tensor], groups: int
) -> None:
    # Reentrant recomputation gives no gradients to what a function does not take: no prefix.
    values = Values.of(sum(EIGHT.lengths), groups, with_prefix=how is recomputed)
    chunked = Chunked(values, EIGHT, window=6, how=how)
    assert_same(chunked.run(), uncut(values, EIGHT, window=6))
    assert_nothing_left(chunked.carry)


def test_what_a_chunk_left_is_dropped_after_its_backward() -> None:
    chunked = Chunked(Values.of(sum(EIGHT.lengths), 2), EIGHT)
    for number in range(8):
        chunked.forward(number)
    rows = [{name: sum(k.shape[0] for k, _ in pairs) for name, pairs in chunked.carry._left.items() if pairs}]
    for number in reversed(range(8)):
        chunked.backward(number)
        rows.append(
            {n: sum(k.shape[0] for k, _ in pairs) for n, pairs in chunked.carry._left.items() if pairs}
        )
    # What is left of the last chunk of a sequence nobody wants: 21 - 2 and 8 - 3 tokens to begin with.
    a, b = (0, "a", 7), (0, "b", 7)
    assert [found.get(a, 0) for found in rows] == [19, 19, 16, 15, 10, 8, 4, 3, 0]
    assert [found.get(b, 0) for found in rows] == [5, 5, 5, 5, 4, 2, 0, 0, 0]
    assert_nothing_left(chunked.carry)


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_gradients_are_summed_in_fp32_or_better(dtype: torch.dtype, summed: torch.dtype) -> None:
    chunked = Chunked(Values.of(sum(EIGHT.lengths), 2, dtype=dtype), EIGHT)
    for number in range(8):
        chunked.forward(number)
    assert {x.dtype for pairs in chunked.carry._left.values() for pair in pairs for x in pair} == {dtype}
    for number in reversed(range(1, 8)):
        chunked.backward(number)
        held = [x for pair in chunked.carry._gradients.values() for x in pair]
        assert held and {x.dtype for x in held} == {summed}
    chunked.backward(0)
    assert {leaf.grad.dtype for leaf in chunked.leaves if leaf.grad is not None} == {dtype}


@pytest.mark.parametrize("first", [1, 2])
def test_forward_passes_out_of_order_are_refused(first: int) -> None:
    chunked = Chunked(Values.of(sum(EIGHT.lengths), 2), EIGHT)
    if first == 2:
        chunked.forward(0)
    with pytest.raises(RuntimeError, match=r"sequence 7 of a begins at token .* chunks run forward in order"):
        chunked.forward(first)


@pytest.mark.parametrize("skipped", range(1, 8))
def test_backward_passes_out_of_order_are_refused(skipped: int) -> None:
    chunked = Chunked(Values.of(sum(EIGHT.lengths), 2), EIGHT)
    for number in range(8):
        chunked.forward(number)
    for number in reversed(range(skipped + 1, 8)):
        chunked.backward(number)
    chunked.backward(skipped - 1)
    with pytest.raises(RuntimeError, match="backward in reverse"):
        chunked.backward(skipped)


def test_what_is_not_cut_passes_through() -> None:
    key, value = torch.randn(5, 2, SIZE), torch.randn(5, 2, SIZE)
    carry = Carry()
    found = carry.extend(0, key, value, [Segment("a", 0, 3, 0), Segment("a", 3, 2, 1)])
    assert found[0] is key and found[1] is value
    assert_nothing_left(carry)


def test_sequences_and_tasks_do_not_meet() -> None:
    # The same number in two tasks, and two numbers in one: each finds its own past, in the order of segments.
    carry = Carry()
    key, value = torch.arange(12.0).view(6, 1, 2), -torch.arange(12.0).view(6, 1, 2)
    names = [("a", 0), ("a", 1), ("b", 0)]
    carry.extend(0, key, value, [Segment(t, 2 * i, 2, n, 0, True) for i, (t, n) in enumerate(names)])
    later = [Segment("b", 0, 1, 0, 2), Segment("a", 1, 1, 1, 2)]
    keys, values = carry.extend(0, torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), later)
    assert torch.equal(keys, torch.cat([key[4:], key[2:4], torch.zeros(2, 1, 2)]))
    assert torch.equal(values, -keys)
    with pytest.raises(RuntimeError, match="layer 1"):
        carry.extend(1, key[:2], value[:2], later)
