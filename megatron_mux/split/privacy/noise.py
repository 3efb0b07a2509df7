"""What a client may do to the rows that leave it: clip them record by record, and add Gaussian noise.

A record is one sequence of a batch, with its `[t, H]` rows of hidden states and of gradients. Clipping scales all rows
of a record by one factor, so that their Frobenius norm is at most C; the noise's standard deviation is
`noise_multiplier` x C in each coordinate. `accountant` says what epsilon that gives.

The noise is a function of a secret, so that an interrupted run resumes exactly. The server must not be able to compute
it: the task's seed, which the server is told, would let it subtract the noise, and the guarantee would be void. So the
secret is 256 random bits that stay on the client (`read_secret`), and the noise is made of a ChaCha20 keystream; the
state of a usual random number generator can be found by trial or from its output. The keystream's key is an HMAC of
step, operation and of the clipped rows themselves. An operation that is sent again with equal rows thus gets equal
noise and tells nothing new; if its rows differ, as those of gradients do if the server answers otherwise the second
time, the noise is independent, where equal noise would cancel in the difference.

Shapes: T rows of a micro-batch, H hidden, t rows of a record.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.section import Number, Section, problem
from megatron_mux.split.privacy.accountant import Releases, epsilon_of, multiplier_for

_SECRET_BYTES = 32
_ACTIVATIONS, _GRADIENTS = 0, 1


class Privacy(Section):
    """Clipping and noise of what leaves a client."""

    clip_activations: Number = Field(gt=0)
    """Frobenius norm that a record's hidden states are clipped to. Choose it on public text, not on the data."""
    clip_gradients: Number = Field(gt=0)
    """Frobenius norm that a record's gradients are clipped to."""
    noise_multiplier: Number | None = Field(default=None, ge=0)
    """Standard deviation of the noise, relative to the norm that is clipped to. 0: clipping only, no privacy."""
    target_epsilon: Number | None = Field(default=None, gt=0)
    """Instead of noise_multiplier: the epsilon that the planned releases may spend, from which it follows."""
    delta: Number = Field(gt=0, lt=1)
    """Delta of (epsilon, delta): well below one over the number of records."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Privacy:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise problem("give either noise_multiplier or target_epsilon")
        return self


class Noise:
    """Clips a client's outgoing rows, adds noise to them, and tells what that is worth.

    The epsilon covers what a record's own rows tell. It holds for everything the server sees only if the client trains
    no layer of its own: other records' rows, and the gradient norm that the client sends, depend on its adapter, which
    has learnt from the record without noise.

    Args:
        privacy: Clipping norms, and how much noise.
        secret: Random bytes that only the client knows; see `read_secret`.
        planned: Releases of a record over the whole run, for `target_epsilon`.

    Attributes:
        privacy: As given.
        noise_multiplier: Standard deviation of the noise, relative to the clipping norm.

    Raises:
        UserError: `dp-accounting` is not installed.
    """

    def __init__(self, privacy: Privacy, secret: bytes, planned: Releases) -> None:
        self.privacy = privacy
        self._secret = secret
        if privacy.noise_multiplier is not None:
            self.noise_multiplier = privacy.noise_multiplier
        else:
            assert privacy.target_epsilon is not None
            self.noise_multiplier = multiplier_for(privacy.target_epsilon, planned, privacy.delta)
        self.spent(planned)  # without the library, a run fails before its first step

    def activations(self, hidden: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        """Hidden states as they may leave the client.

        Differentiable: the factor of clipping depends on the rows, and the gradient of what is returned becomes that of
        `hidden`.

        Args:
            hidden: `[T, H]`.
            lengths: Rows of each record, in order.
            operation: Number of the operation in its step; a resumed run must count alike to get the same noise.

        Returns:
            `[T, H]` fp32.
        """
        return self._release(hidden, lengths, self.privacy.clip_activations, (_ACTIVATIONS, step, operation))

    def gradients(self, gradient: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        """Gradients as they may leave the client; arguments as of `activations`.

        Returns:
            `[T, H]` fp32.
        """
        return self._release(gradient, lengths, self.privacy.clip_gradients, (_GRADIENTS, step, operation))

    def spent(self, releases: Releases) -> float:
        """The epsilon that releases of a record spend, at the section's delta."""
        return epsilon_of(self.noise_multiplier, releases, self.privacy.delta)

    def _release(self, rows: Tensor, lengths: Sequence[int], norm: float, place: tuple[int, ...]) -> Tensor:
        clipped = clip_records(rows, lengths, norm)
        content = clipped.detach().cpu().contiguous().numpy()
        key = hmac.new(self._secret, struct.pack("<3Q", *place), "sha256")
        key.update(struct.pack(f"<{len(lengths)}Q", *lengths))
        key.update(content.data)
        noise = torch.from_numpy(_normal(key.digest(), content.size)).view(clipped.shape)
        return clipped + noise.to(clipped.device) * (self.noise_multiplier * norm)


def clip_records(rows: Tensor, lengths: Sequence[int], norm: float) -> Tensor:
    """Scale the rows of each record whose Frobenius norm is above `norm` down to it, differentiably.

    Args:
        rows: `[T, H]`.
        lengths: Rows of each record, in order.

    Returns:
        `[T, H]` fp32.
    """
    rows = rows.float()
    record = torch.repeat_interleave(torch.tensor(lengths, device=rows.device))
    squares = rows.new_zeros(len(lengths)).index_add(0, record, rows.square().sum(dim=1))
    # Clamped before the root, whose derivative at 0 is infinite.
    factor = norm * squares.clamp(min=norm * norm).rsqrt()
    return rows * factor[record].unsqueeze(1)


def read_secret(path: Path) -> bytes:
    """Read the client's secret; make one, which only its owner may read, if there is none.

    Raises:
        UserError: The file holds something else.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        pass
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise UserError(
            f"{path}: must hold the {_SECRET_BYTES} bytes of a client's secret, has {len(secret)}: delete it"
        )
    return secret


def _normal(key: bytes, count: int) -> NDArray[np.float32]:
    """Standard normal numbers from a ChaCha20 keystream (Box and Muller's method, in fp64)."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    half = (count + 1) // 2
    # Each key is used once, so the nonce may be constant.
    keystream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(16 * half))
    uniform: NDArray[Any] = (np.frombuffer(keystream, "<u8") >> 11) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:half]))
    angle = 2 * math.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].astype(np.float32)
