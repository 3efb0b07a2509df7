"""How messages of tensor ranks travel: over NVLink SHARP, NCCL with few CTAs, or gloo, by what the machine can do.

A message that runs beside computation should take little of the GPU from it. MuxTune bounds its CTAs, and lets the
switch add up where it can (NVLink SHARP), so that few CTAs suffice.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.exchange import Exchange, PendingResult
from megatron_mux.backbone.pieces import Message
from megatron_mux.process_groups import bounded_tensor_group
from megatron_mux.runtime import Parallel, is_gpu

CTAS = 8
"""CTAs that a message takes at most, unless a flag says otherwise."""

_MULTICAST_CTAS = 8  # what torch's multicast operators take at most; it cannot be set
_MULTICAST_DTYPES = (torch.bfloat16, torch.float32)
_SLOT_BYTES = 32 << 20  # of memory that all ranks of a group see; a longer message travels in parts
_ALIGNMENT = 16  # bytes that one load of a multicast operator moves

_BOOT = Path("/proc/sys/kernel/random/boot_id")

Way = Literal["multicast", "nccl", "gloo"]


class GroupExchange(Exchange):
    """Messages as collectives of a process group: on GPUs NCCL, on a stream of its own; on CPUs gloo, in a thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def issue(self, message: Message) -> PendingResult:
        """See `Exchange.issue`."""
        tensor = message.tensor.contiguous()
        made = _made_of(message, tensor, self._group)
        return PendingResult(made, _collective(message, made, tensor, self._group, async_op=True), tensor)


class MulticastExchange(Exchange):
    """Messages over NVLink SHARP: the switch sums what ranks have in a slot of memory that all of them see.

    They are copied into the slot and out of it. torch has no such reduce-scatter: that, and what the operators do not
    take, goes over NCCL, which uses NVLink SHARP by itself where it can. Both follow each other on one stream, so the
    slot is free when the next message comes: an operator ends once all ranks are done with it.

    Args:
        slot: `[n]` uint8, of all ranks of the group; see `multicast_slot`.
    """

    def __init__(self, group: dist.ProcessGroup, slot: Tensor) -> None:
        self._group = group
        self._slot = slot
        # Of high priority: blocks of a message start before those of products that wait already.
        self._stream = torch.cuda.Stream(slot.device, priority=-1)

    def issue(self, message: Message) -> PendingResult:
        """See `Exchange.issue`."""
        tensor = message.tensor.contiguous()
        made = _made_of(message, tensor, self._group)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for one in (made, tensor):  # a pass that fails drops them without waiting
                one.record_stream(self._stream)
            self._send(message, made, tensor)
            arrived = self._stream.record_event()
        return PendingResult(made, arrived, tensor)

    def _send(self, message: Message, made: Tensor, tensor: Tensor) -> None:
        """Exchange on the current stream. What decides on the way there is the same on all ranks."""
        fits = tensor.dtype in _MULTICAST_DTYPES and tensor.nbytes and tensor.nbytes % _ALIGNMENT == 0
        if fits and message.kind == "all_reduce":
            self._all_reduce(tensor.view(-1))
        elif fits and message.kind == "all_gather":
            self._all_gather(made.view(self._group.size(), -1), tensor.view(1, -1))
        else:
            _collective(message, made, tensor, self._group, async_op=False)

    def _all_reduce(self, x: Tensor) -> None:
        slot = self._slot.view(x.dtype)
        for part in x.split(len(slot)):
            own = slot[: len(part)]
            own.copy_(part)
            torch.ops.symm_mem.multimem_all_reduce_(own, "sum", self._group.group_name)
            part.copy_(own)

    def _all_gather(self, made: Tensor, x: Tensor) -> None:
        """Gather `[1, n]` of each rank as `[ranks, n]`."""
        if x.data_ptr() % _ALIGNMENT:
            x = x.clone()
        slot, ranks = self._slot.view(x.dtype), len(made)
        most = len(slot) // (ranks * _ALIGNMENT) * _ALIGNMENT
        for part, place in zip(x.split(most, 1), made.split(most, 1), strict=True):
            own = slot[: ranks * part.shape[1]].view(ranks, -1)
            torch.ops.symm_mem.multimem_all_gather_out(part, self._group.group_name, own)
            place.copy_(own)


def _made_of(message: Message, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor that a message makes; a sum of all rows is made in place."""
    rows, *width = tensor.shape
    if message.kind == "all_gather":
        return tensor.new_empty(rows * group.size(), *width)
    if message.kind == "reduce_scatter":
        return tensor.new_empty(rows // group.size(), *width)
    return tensor


def _collective(
    message: Message, made: Tensor, tensor: Tensor, group: dist.ProcessGroup, async_op: bool
) -> Any:
    if message.kind == "all_reduce":
        return dist.all_reduce(made, group=group, async_op=async_op)
    if message.kind == "all_gather":
        return dist.all_gather_into_tensor(made, tensor, group=group, async_op=async_op)
    return dist.reduce_scatter_tensor(made, tensor, group=group, async_op=async_op)


# -- which one


@dataclass(frozen=True)
class Capabilities:
    """What messages can travel over: what every rank has.

    Attributes:
        gpu: Ranks compute on GPUs.
        compute: The least compute capability of a GPU.
        one_node: The ranks of each tensor group are on one node.
        multicast: The driver offers multicast between GPUs.
    """

    gpu: bool
    compute: tuple[int, int] = (0, 0)
    one_node: bool = False
    multicast: bool = False


def choose(has: Capabilities, ctas: int = CTAS) -> tuple[Way, str]:
    """Choose how messages travel.

    Args:
        has: What every rank has.
        ctas: CTAs that a message may take.

    Returns:
        The way, and why no better one.
    """
    if not has.gpu:
        return "gloo", "on a CPU"
    lacking = {
        f"needs compute capability 9.0, not {has.compute[0]}.{has.compute[1]}": has.compute < (9, 0),
        "needs all tensor ranks on one node": not has.one_node,
        "needs a driver and GPUs with multicast": not has.multicast,
        f"takes {_MULTICAST_CTAS} CTAs": ctas < _MULTICAST_CTAS,
    }
    reason = next((text for text, is_lacking in lacking.items() if is_lacking), "")
    return ("nccl", f"NVLink SHARP {reason}") if reason else ("multicast", "")


def make_exchange(parallel: Parallel, ctas: int = CTAS) -> tuple[Exchange, str]:
    """Make what carries the messages of tensor ranks. A collective: every rank of the world calls it.

    Args:
        ctas: CTAs of a GPU that a message may take from computation.

    Returns:
        It, and a line that says which one.
    """
    way, why = choose(_capabilities(parallel), ctas)
    if way == "gloo":
        return GroupExchange(parallel.tp_group), f"messages of tensor ranks: gloo ({why})"
    group = bounded_tensor_group(parallel, ctas)
    if way == "multicast":
        slot = multicast_slot(group, parallel.device)
        (lacking,) = parallel.total([slot is None])
        if slot is not None and not lacking:
            said = f"messages of tensor ranks: NVLink SHARP with {_MULTICAST_CTAS} CTAs"
            return MulticastExchange(group, slot), said
        why = "NVLink SHARP: the GPUs cannot share memory with multicast"
    return GroupExchange(group), f"messages of tensor ranks: NCCL with at most {ctas} CTAs ({why})"


def _capabilities(parallel: Parallel) -> Capabilities:
    """What every rank of the world has."""
    if not is_gpu(parallel.device):
        return Capabilities(gpu=False)
    ranks = dist.get_process_group_ranks(parallel.tp_group)
    own = (
        _machine(),
        ranks,
        torch.cuda.get_device_capability(parallel.device),
        _has_multicast(parallel.device),
    )
    everywhere: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(everywhere, own)
    hosts, groups, compute, multicast = zip(*everywhere, strict=True)
    one_node = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
    return Capabilities(True, min(compute), one_node, all(multicast))


def _machine() -> str:
    """What tells machines apart, also where containers on several of them have the same host name."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def _has_multicast(device: torch.device) -> bool:
    """Whether a GPU and its driver have multicast, by torch's own test."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return False
    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))


def multicast_slot(group: dist.ProcessGroup, device: torch.device, size: int = _SLOT_BYTES) -> Tensor | None:
    """`[size]` uint8 of memory that all ranks of a group see, also at once; None where that fails on this rank.

    A collective of the group.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        slot = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        shared: Any = symmetric_memory.rendezvous(slot, group)
    except (ImportError, RuntimeError):  # a container may forbid it, or the fabric's manager may not run
        return None
    return slot if shared.multicast_ptr else None
