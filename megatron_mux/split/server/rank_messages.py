"""Messages between the ranks of one server: JSON and raw tensors, sent and received by any operation of torch's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast(tensor: Tensor) -> None:
    """Send a tensor from rank 0 to all others, or receive it there."""
    dist.broadcast(tensor, 0)


def put(
    fields: Mapping[str, Any],
    tensors: Sequence[Tensor],
    device: torch.device,
    send: Callable[[Tensor], object],
) -> None:
    """Send JSON and tensors: the length of the JSON, the JSON, and each tensor as it is.

    Args:
        send: Sends one tensor; empty ones are left out.
    """
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps({**fields, "tensors": shapes}).encode()
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for tensor in (torch.tensor([len(text)]), content, *tensors):
        if tensor.numel():
            send(tensor.detach().to(device).contiguous())


def take(device: torch.device, receive: Callable[[Tensor], object]) -> tuple[dict[str, Any], list[Tensor]]:
    """Receive what `put` sends.

    Args:
        receive: Fills one tensor.

    Returns:
        The fields and the tensors.
    """
    length = torch.zeros(1, dtype=torch.int64, device=device)
    receive(length)
    content = torch.empty(int(length), dtype=torch.uint8, device=device)
    receive(content)
    fields = json.loads(bytes(content.cpu().numpy()))
    tensors = []
    for dtype, shape in fields.pop("tensors"):
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        if tensors[-1].numel():
            receive(tensors[-1])
    return fields, tensors
