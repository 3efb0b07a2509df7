"""The weights of a layer, the embedding or the output layer: in place during use, elsewhere or quantised between uses.

A group has up to two buffers, which have memory only while they are needed. `FetchedBytes` brings what is kept in host
memory or divided over data-parallel ranks; what it brings ahead are quantised bytes, if the weights are quantised.
`DequantisedWeights` holds the values of the group that is in use; those of experts are dequantised once rows have
selected them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_mux.quantised.matrix import QuantisedMatrix
from megatron_mux.runtime import Parallel

_ALIGNMENT = 256
"""Parameters and shares start at multiples of so many bytes, like torch's own allocations."""
_QUANTISED_ALIGNMENT = 16
"""Tensors of quantised matrices, some of which are tiny, at multiples of so many."""


class SideStream:
    """Runs work beside computation: on a stream of its own on a GPU, at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        there = device.type == "cuda" and torch.cuda.is_available()  # a dry run has none
        self._stream = torch.cuda.Stream(device) if there else None

    @contextmanager
    def after_what_came_before(self) -> Iterator[None]:
        """Run what is enqueued inside on the side stream, after everything enqueued before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let computation enqueued from now on wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class FetchedBytes:
    """Tensors that are views of one buffer, which is filled before use and dropped after.

    Args:
        parameters: Tensors in the backbone's dtype, filled.
        quantised: Tensors of quantised matrices.
        shares: Number of ranks of `parallel.dp_group` that keep a share each; 1: each rank keeps everything.
        offloaded: Whether the share is kept in host memory.
        side: Stream of copies and gathers.

    Attributes:
        views: All tensors, in the buffer.
        whole: The buffer.
        share: What this rank keeps of it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        quantised: Sequence[Tensor],
        parallel: Parallel,
        shares: int,
        offloaded: bool,
        side: SideStream,
    ) -> None:
        self._side = side
        self._coming: list[dist.Work] = []
        self._here = False
        tensors = [*parameters, *quantised]
        sizes = [_aligned(one.nbytes) for one in parameters]
        sizes += [_aligned(one.nbytes, _QUANTISED_ALIGNMENT) for one in quantised]
        starts = [0, *accumulate(sizes)]
        size = _aligned(-(-starts[-1] // shares))
        self._group = parallel.dp_group if shares > 1 and size else None
        # Bytes, so that one buffer serves whatever dtypes there are.
        self.whole = torch.zeros(size * shares, dtype=torch.uint8, device=parallel.device)
        self.views = []
        for tensor, start in zip(tensors, starts, strict=False):
            place = self.whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self.views.append(place.copy_(tensor))
        rank = parallel.dp_rank if shares > 1 else 0
        self._place = self.whole[rank * size : (rank + 1) * size]
        self.share = self._place.to("cpu", copy=True) if offloaded else self._place.clone()
        if offloaded and parallel.device.type == "cuda":
            self.share = self.share.pin_memory()
        self._empty()

    def bring(self) -> None:
        """Start to fill the buffer, unless it is filled or being filled already."""
        if self._here:
            return
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self._here = True
        with self._side.after_what_came_before():
            self._place.copy_(self.share, non_blocking=True)
            if self._group is not None:
                work = dist.all_gather_into_tensor(self.whole, self._place, group=self._group, async_op=True)
                self._coming.append(work)

    def arrive(self) -> None:
        """Make the computations that follow wait for what is being brought."""
        while self._coming:
            self._coming.pop(0).wait()
        self._side.join()

    def drop(self) -> None:
        """Give the buffer's memory back."""
        self._here = False
        self._empty()

    def _empty(self) -> None:
        # What autograd has saved are views too: they see the weights again once the buffer is filled.
        self.whole.untyped_storage().resize_(0)


SelectExperts = Callable[[Tensor], None]
"""Dequantises a layer's experts that have rows: `[experts]` integers on the device. The host does not read them."""


class _Dequantised(NamedTuple):
    """A parameter, what it is dequantised from, and its place in the buffer."""

    parameter: nn.Parameter
    matrix: QuantisedMatrix
    place: Tensor


class DequantisedWeights:
    """Parameters that are views of one buffer, into which quantised matrices are dequantised before use.

    Args:
        parameters: Empty ones of equal dtype.
        matrices: For each parameter, its quantised matrix.
        device: Of the buffer.

    Attributes:
        whole: The buffer.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        matrices: Sequence[QuantisedMatrix],
        device: torch.device,
    ) -> None:
        self.matrices = matrices
        self._here = False
        dtype = parameters[0].dtype
        sizes = [_aligned(one.rows * one.columns * dtype.itemsize) // dtype.itemsize for one in matrices]
        self.whole = torch.empty(sum(sizes), dtype=dtype, device=device)
        self._dense, self._by_experts = list[_Dequantised](), list[_Dequantised]()
        for parameter, matrix, part in zip(parameters, matrices, self.whole.split(sizes), strict=True):
            parameter.data = part[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
            self._dense.append(_Dequantised(parameter, matrix, parameter.data))
        self._selected: list[Tensor] = []
        self.drop()

    def on_demand(self, parameters: Sequence[nn.Parameter]) -> SelectExperts | None:
        """Leave parameters out of `fill` from now on.

        Args:
            parameters: Those with the rows of all experts of this rank, one after the other; others of this group, and
                those that are not quantised, are left as they are.

        Returns:
            What dequantises some of their experts while the buffer is there, and until it is dropped; None: none of
            the parameters are quantised.
        """
        wanted = set(map(id, parameters))
        self._by_experts = [one for one in self._dense if id(one.parameter) in wanted]
        self._dense = [one for one in self._dense if id(one.parameter) not in wanted]
        return self._fill_experts if self._by_experts else None

    def fill(self) -> None:
        """Dequantise all matrices that are not experts', unless that has been done."""
        if self._here:
            return
        self._here = True
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        with torch.no_grad():
            for one in self._dense:
                one.matrix.dequantise_into(one.place)

    def _fill_experts(self, counts: Tensor) -> None:
        """Dequantise the experts with rows: `[experts]` integers on the device, the rows of each."""
        # A backward that computes its layer again, and interleaved passes, need the same ones more than once.
        if any(one is counts for one in self._selected):
            return
        self._selected.append(counts)
        with torch.no_grad():
            for one in self._by_experts:
                one.matrix.dequantise_into(one.place, counts)

    def drop(self) -> None:
        """Give the buffer's memory back."""
        self._here = False
        self._selected.clear()
        self.whole.untyped_storage().resize_(0)


def before_backward(y: Tensor, prepare: Callable[[], None]) -> Tensor:
    """Return `y`, and call `prepare` in the backward pass before what made it is run backward."""
    prepared: Tensor = _BeforeBackward.apply(y, prepare)  # type: ignore[no-untyped-call]
    return prepared


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, prepare: Callable[[], None]) -> Tensor:
        ctx.prepare = prepare
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.prepare()
        return gradient, None


class WeightGroup:
    """The frozen parameters of a group: in place during use.

    Args:
        fetched: What is kept elsewhere; None: nothing.
        dequantised: What is quantised; None: nothing.

    Attributes:
        uses: How many passes are using the weights: those that are interleaved share them.
    """

    def __init__(self, fetched: FetchedBytes | None, dequantised: DequantisedWeights | None) -> None:
        self.fetched, self.dequantised = fetched, dequantised
        self.uses = 0

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        quantised: Sequence[tuple[nn.Parameter, QuantisedMatrix]],
        parallel: Parallel,
        shares: int,
        offloaded: bool,
        side: SideStream,
    ) -> WeightGroup:
        """Take over filled parameters and quantised matrices.

        Args:
            parameters: Those that are not quantised. They become views of the group's buffer.
            quantised: The others, with their matrices.
            parallel, shares, offloaded, side: See `FetchedBytes`.
        """
        matrices = [matrix for _, matrix in quantised]
        fetched = dequantised = None
        if shares > 1 or offloaded:
            tensors = [tensor for one in matrices for tensor in one.tensors]
            plain = [one.detach() for one in parameters]
            fetched = FetchedBytes(plain, tensors, parallel, shares, offloaded, side)
            views = iter(fetched.views)
            for parameter in parameters:
                # This keeps the parameter's own version counter: autograd does not mistake a refill for a change.
                parameter.data = next(views)
            for matrix in matrices:
                matrix.tensors = [next(views) for _ in matrix.tensors]
        if quantised:
            dequantised = DequantisedWeights([one for one, _ in quantised], matrices, parallel.device)
        return cls(fetched, dequantised)

    def bring(self) -> None:
        """Start to fetch what is kept elsewhere."""
        if self.fetched is not None:
            self.fetched.bring()

    def wait(self) -> None:
        """Make the computations that follow wait until the weights are in place."""
        self.bring()
        if self.fetched is not None:
            self.fetched.arrive()
        if self.dequantised is not None:
            self.dequantised.fill()

    def abandon(self) -> None:
        """Drop the weights, fetched or being fetched, after a pass was interrupted."""
        self.uses = 0
        if self.fetched is not None:
            self.fetched.arrive()
        self.drop()

    def drop(self) -> None:
        """Give the memory of the weights back."""
        if self.fetched is not None:
            self.fetched.drop()
        if self.dequantised is not None:
            self.dequantised.drop()


def _aligned(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
