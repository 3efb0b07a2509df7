"""A task's own rows of the embedding and of the output layer, on a rank: parameters of its adapter.

A whole matrix is divided among tensor ranks as the vocabulary is. Every tensor rank has all rows of single tokens, and
adds the gradients of its part of the vocabulary: tensor ranks sum them with other partial gradients. With a pipeline,
the first and the last stage both have the rows that stand for both matrices, and sum their gradients
(`engine/tied_rows.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.flat_params import FlatParams
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.vocabulary_fields import OwnMatrix
from megatron_mux.errors import UserError
from megatron_mux.kernels.own_rows import OwnRows, Place, VocabularyPart

Make = Callable[..., AdapterParameter]


class TaskRows:
    """The rows of the vocabulary matrices that one task trains on this rank.

    Args:
        matrices: What the task trains of the vocabulary.
        make: `TaskAdapter.make`, which notes a parameter in the task's adapter.
        fresh: Whether they start from the backbone's rows.

    Attributes:
        tied: Rows that stand for both matrices: their parameter on this rank, None if it has neither end.
        found: Once the adapter has its flat parameters, the rows by matrix.

    Raises:
        UserError: The backbone is divided in a way that has no place for them.
    """

    def __init__(self, host: Host, name: str, matrices: Sequence[OwnMatrix], make: Make, fresh: bool) -> None:
        # Not the adapter itself, which has this object: without a cycle it is freed as soon as it is dropped.
        self._host, self._name = host, name
        self._made: list[tuple[OwnMatrix, AdapterParameter]] = []
        self.tied: list[tuple[OwnMatrix, AdapterParameter | None]] = []
        self.found: dict[Place, OwnRows] = {}
        if matrices and host.vocabulary is None:
            raise UserError(
                f"task {name!r}: modules_to_save and trainable_token_indices are not supported with split fine-tuning: "
                "leave them out"
            )
        if matrices:
            host.parallel.experts.refuse("own rows", name)
        for matrix in matrices:
            made = self._made_of(matrix, make, fresh)
            if made is not None:
                self._made.append((matrix, made))
            if len(matrix.places) > 1:
                self.tied.append((matrix, made))

    def _made_of(self, matrix: OwnMatrix, make: Make, fresh: bool) -> AdapterParameter | None:
        """The parameter of a matrix; None where this rank has none of its ends."""
        parts = self._host.vocabulary or {}
        here = [place for place in matrix.places if place in parts]
        if not here:
            return None
        part = parts[here[0]]
        if matrix.tokens is None:
            index = torch.arange(part.start, part.stop)
            return make(matrix.key, 0, index, start=part.read() if fresh else None)
        order = torch.tensor(matrix.tokens).argsort()
        start = self._rows_of_tokens(matrix.tokens, part) if fresh else None
        return make(matrix.key, 0, order, owner=here[0] == matrix.places[0], start=start)

    def _rows_of_tokens(self, tokens: tuple[int, ...], part: VocabularyPart) -> Tensor:
        """`[R, H]` the backbone's rows of tokens, ascending, from whichever tensor ranks hold them."""
        host, ordered = self._host, sorted(tokens)
        held = _held(ordered, part)
        rows = torch.zeros(len(ordered), host.shape.hidden, dtype=host.parameter_dtype)
        rows[held] = part.read()[torch.tensor(ordered[held], dtype=torch.int64) - part.start].to(rows.dtype)
        if host.parallel.tp_size > 1:
            rows = rows.to(host.device)
            dist.all_reduce(rows, group=host.parallel.tp_group)
        return rows.cpu()

    def find(self, flat_params: FlatParams) -> None:
        """Make `found`, of parameters that are views of `flat_params`."""
        host = self._host
        for matrix, parameter in self._made:
            for place in matrix.places:
                part = (host.vocabulary or {}).get(place)
                if part is None:
                    continue
                values, gradient = flat_params.copy_of(parameter), parameter.value.grad
                assert gradient is not None
                tokens, held = None, slice(0, values.shape[0])
                if matrix.tokens is not None:
                    ordered = sorted(matrix.tokens)
                    tokens, held = torch.tensor(ordered, device=host.device), _held(ordered, part)
                self.found[place] = OwnRows(values, gradient, tokens, held)

    def enter(self) -> None:
        """Have the backbone use them."""
        for place, rows in self.found.items():
            assert self._host.vocabulary is not None
            self._host.vocabulary[place].own[self._name] = rows

    def leave(self) -> None:
        """Have the backbone use its own rows again."""
        for place in self.found:
            assert self._host.vocabulary is not None
            del self._host.vocabulary[place].own[self._name]


def _held(tokens: list[int], part: VocabularyPart) -> slice:
    """Those of ascending tokens that belong to a rank's part of the vocabulary."""
    return slice(bisect_left(tokens, part.start), bisect_left(tokens, part.stop))
