"""NEFTune: uniform noise on the embeddings of a task's tokens while it trains (Jain et al., 2023).

Noise is a function of the task's seed, the step, the sequence, the token and the feature, as dropout masks are: it does
not depend on packing, ranks or neighbours. Its magnitude is alpha / sqrt(L H) with L the sequence's own length: where
`transformers` pads a batch, L there is the length of the padded batch.
Shapes: n rows of the task, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_mux.kernels.dropout import row_uniform
from megatron_mux.runtime import to_device


@dataclass
class EmbeddingNoise:
    """The noise of one task.

    Attributes:
        key: From `key_of(task seed, ...)`.
        alpha: `neftune_noise_alpha`.
        lengths: Number of tokens of each sequence of a step's batch, in order.
    """

    key: int
    alpha: float
    lengths: Callable[[int], Sequence[int]]
    _known: dict[int, Tensor] = field(default_factory=dict)

    def of(self, step: int, sequence_ids: Tensor, token_index: Tensor, hidden: int) -> Tensor:
        """Noise for some rows: `[n, H]` fp32.

        Args:
            sequence_ids: `[n]` int64, the sequence of each row.
            token_index: `[n]` int64, the token of each row within its sequence.
            hidden: H.
        """
        magnitude = self._magnitudes(step, hidden, sequence_ids.device)[sequence_ids]
        noise = row_uniform(self.key, step, sequence_ids, token_index, hidden)
        return noise.mul_(2.0).sub_(1.0).mul_(magnitude.unsqueeze(1))

    def _magnitudes(self, step: int, hidden: int, device: torch.device) -> Tensor:
        """`[sequences]` fp32 on the device, of a step's sequences; nobody waits for the copy."""
        if step not in self._known:
            if len(self._known) > 1:
                self._known.pop(min(self._known))
            lengths = torch.tensor(self.lengths(step), dtype=torch.float32)
            self._known[step] = to_device(self.alpha / (lengths * hidden).sqrt(), device)
        return self._known[step]
