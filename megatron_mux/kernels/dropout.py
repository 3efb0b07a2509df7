"""Counter-based random numbers: dropout masks that do not depend on packing, ranks or the order of computation.

Each value is a hash of a key (task seed, module) and of a place (step, sequence, token, feature, or an element of a
matrix). The same task gets the same masks alone or among others, at any tensor- or pipeline-parallel size, on CPU and
on GPU, and again when a forward is recomputed. Keys of dropout do not depend on the step, so that they are made once,
where a task is registered, and kernels need nothing new from the host in a step.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_LEVELS = 1 << 16  # dropout probabilities are multiples of 1 / _LEVELS


def key_of(*parts: int | str) -> int:
    """A 64-bit key of seeds, counters and names; equal parts give equal keys, on every machine and Python.

    Args:
        parts: Everything that the random numbers depend on, in a fixed order.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keep_mask(
    key: int,
    step: int,
    sequence_ids: Tensor,
    token_index: Tensor,
    features: tuple[int, int],
    probability: float,
) -> Tensor:
    """Which entries of the rows' features dropout keeps.

    Args:
        key: From `key_of(task seed, name of the dropout field, module)`.
        sequence_ids: `[n]` int64, the sequence of each row.
        token_index: `[n]` int64, the token of each row within its sequence.
        features: First and one past the last global feature index.
        probability: Of dropping an entry; rounded to a multiple of 2^-16.

    Returns:
        `[n, features]` bool, True where the entry is kept.
    """
    start, stop = features
    low = halves(key)[0]
    row = _row_hash(key, step, sequence_ids, token_index)
    # A hash has 32 bits and a decision takes 16: one hash serves two neighbouring features.
    first, last = start // 2, (stop + 1) // 2
    column = _mix_(torch.arange(first, last, dtype=torch.int32, device=row.device) ^ low)  # [pairs]
    bits = _mix_(row[:, None] ^ column[None, :]).view(torch.int16)  # [n, 2 * pairs]
    bits = bits[:, start - 2 * first : stop - 2 * first]
    return bits >= threshold(probability)


def _row_hash(key: int, step: int, sequence_ids: Tensor, token_index: Tensor) -> Tensor:
    """`[n]` int32, the share of rows in a hash."""
    low, high = halves(key)
    row = sequence_ids.to(torch.int32) ^ mix(step ^ low)
    return _mix_(_mix_(_mix_(row) + token_index.to(torch.int32)) ^ high)


def row_uniform(key: int, step: int, sequence_ids: Tensor, token_index: Tensor, features: int) -> Tensor:
    """Uniform numbers for the features of rows.

    Args:
        key: From `key_of(task seed, ...)`.
        sequence_ids: `[n]` int64, the sequence of each row.
        token_index: `[n]` int64, the token of each row within its sequence.

    Returns:
        `[n, features]` fp32 strictly between 0 and 1.
    """
    row = _row_hash(key, step, sequence_ids, token_index)
    column = _mix_(torch.arange(features, dtype=torch.int32, device=row.device) ^ halves(key)[0])
    return _uniform_of(_mix_(row[:, None] ^ column[None, :]))


def _uniform_of(bits: Tensor) -> Tensor:
    # 23 bits and a half fit fp32 exactly, so neither end of the interval is ever reached.
    return ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).div_(1 << 23)


def threshold(probability: float) -> int:
    """The least of the hash's signed 16 bits that keeps an entry."""
    return round(probability * _LEVELS) - _LEVELS // 2


def uniform(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform numbers for the elements of a matrix.

    Args:
        key: From `key_of(task seed, step, module)`.
        rows: `[m]` int64 global row indices of the elements wanted.
        columns: `[n]` int64 global column indices.

    Returns:
        `[m, n]` fp32 strictly between 0 and 1.
    """
    low, high = halves(key)
    row = _mix_(_mix_(rows.to(torch.int32) ^ low) ^ high)
    column = _mix_(_mix_(columns.to(torch.int32) ^ high) ^ low)
    return _uniform_of(_mix_(row[:, None] ^ column[None, :]))


def halves(key: int) -> tuple[int, int]:
    """Two signed 32-bit halves of a key, scrambled so that neighbouring keys share nothing."""
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _MASK64
    key ^= key >> 31
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def mix(value: int) -> int:
    """`_mix_` of one number, on the host."""
    value &= 0xFFFFFFFF
    value = (value ^ (value >> 16)) * _FACTOR_1 & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * _FACTOR_2 & 0xFFFFFFFF
    return _signed(value ^ (value >> 16))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


_FACTOR_1 = _signed(0x7FEB352D)
_FACTOR_2 = _signed(0x846CA68B)


def _mix_(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit moves every output bit; overwrites its int32 argument.

    Multiplication wraps; the shifts are made logical by masking the sign's copies away.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _FACTOR_1
    x ^= (x >> 15) & 0x1FFFF
    x *= _FACTOR_2
    x ^= (x >> 16) & 0xFFFF
    return x
