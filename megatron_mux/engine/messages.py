"""What the passes of a rank exchange with ranks that make the same passes, also where it cannot compute them.

Ranks of a tensor group, and those that share weights, meet in the middle of a pass. One that finds no memory there must
not leave the others waiting. It goes through the pass once more from its beginning, with tensors that have no memory,
and takes part in what it has not taken part in yet, from room that was taken beforehand. What it sends means nothing:
the step is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine.room import Room
from megatron_mux.kernels import attention, grouped
from megatron_mux.runtime import Parallel

Counts = Mapping[str, int]
"""Messages by the name of their group."""


def largest_message(stages: Iterable[Backbone], rows: int) -> int:
    """Bytes of the largest message of passes.

    Args:
        stages: This rank's.
        rows: Of the largest pass, before they are divided among tensor ranks.
    """
    sizes = [0]
    for stage in stages:
        sizes.append(stage.residence.largest_message)
        if stage.parallel.tp_size > 1:
            widths = [stage.shape.hidden]
            if (
                stage.shape.kv_heads < stage.parallel.tp_size
            ):  # then Megatron-Core has each rank see all of them
                widths.append(stage.shape.out_features("linear_qkv"))
            sizes.append(rows * max(widths) * stage.dtype.itemsize)
    return max(sizes)


class Messages:
    """The messages of this rank's passes.

    Args:
        stages: This rank's.
        parallel: Where it stands.
        room: For messages of passes that are not computed.
    """

    def __init__(self, stages: Iterable[Backbone], parallel: Parallel, room: Room) -> None:
        self._residences = [stage.residence for stage in stages]
        self._room = room
        self._fake: FakeTensorMode | None = None
        groups = [parallel.tp_group] if parallel.tp_size > 1 else []
        if any(residence.in_step for residence in self._residences):
            groups.append(parallel.dp_group)
        # Messages of different groups may change places; those of one never do.
        self._backends = {
            group.group_name: group._get_backend(parallel.device)
            for group in groups
            if dist.get_backend(group) != "fake"  # nobody is there, and nothing fails
        }

    @property
    def any(self) -> bool:
        """Whether passes exchange anything."""
        return bool(self._backends)

    def abandon(self) -> None:
        """A pass has broken off: drop what it brought."""
        for residence in self._residences:
            residence.abandon()

    def sent(self) -> Counts:
        """How many there have been so far."""
        return {
            name: own._get_sequence_number_for_group()  # type: ignore[attr-defined]
            for name, own in self._backends.items()
        }

    def alone(
        self,
        before: Counts,
        forward: Callable[[], Tensor],
        backward: Callable[[Tensor], None] | None = None,
        *,
        memory: bool,
    ) -> None:
        """Exchange the messages of a pass, and nothing else; what it is made of is dropped.

        Args:
            before: What `sent` was when the pass began: what it has sent since, it has done with.
            forward: Computes it.
            backward: Its backward pass, given what `forward` made: then the messages are of this alone.
            memory: Whether to compute it, which is quicker; else nothing takes memory.

        Raises:
            torch.OutOfMemoryError: There is no memory to compute it, or none for a message larger than the room.
        """
        alone = _Alone({name: count - before[name] for name, count in self.sent().items()})
        with ExitStack() as stack:
            if not memory:
                # One mode for all passes: what chunks leave for each other is of its making.
                self._fake = alone.fake = self._fake or FakeTensorMode(allow_non_fake_inputs=True)
                alone.room = self._room
                stack.enter_context(self._fake)
                for residence in self._residences:
                    stack.enter_context(residence.without_memory())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(alone)
            alone.silent = backward is not None
            made = forward()
            if backward is not None:
                alone.silent = False
                backward(made)
        if not memory:
            # They keep tensors from pass to pass: some have no memory now.
            attention.forget()
            grouped.forget()


class _Alone(TorchDispatchMode):
    """Sends messages but the first ones.

    Args:
        done: How many to leave out, of each group.

    Attributes:
        silent: Leave out all, and do not count them.
        fake: The mode below in which all else is fake; None: it is computed.
        room: For what is sent instead of fake tensors.
    """

    def __init__(self, done: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.silent = False
        self.fake: FakeTensorMode | None = None
        self.room: Room | None = None
        self._done = dict(done)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            # What a message brings is its first argument.
            return args[0], self._work(func, args, kwargs)
        if self.fake is not None:
            # Of real tensors alone the mode below would really compute some operators.
            args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _work(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Send a message unless that is done; what to wait for."""
        if self._is_done(args):
            return torch._C._distributed_c10d.FakeWork().boxed()
        if self.fake is None:
            return func(*args, **kwargs)[-1]
        with unset_fake_temporarily():
            return func(*tree_map_only(Tensor, self._placed, args), **kwargs)[-1]

    def _is_done(self, args: Any) -> bool:
        if self.silent:
            return True
        boxes = (arg for arg in args if isinstance(arg, torch.ScriptObject))
        name = dist.ProcessGroup.unbox(next(boxes)).group_name
        done = self._done[name] > 0
        self._done[name] -= done
        return done

    def _faked(self, tensor: Tensor) -> Tensor:
        assert self.fake is not None
        if isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            return self.fake.from_tensor(tensor)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Room for a tensor: the same for all, since nothing that lies there means anything."""
        assert self.room is not None
        return self.room.of(tensor.numel(), tensor.dtype)
