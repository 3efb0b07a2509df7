"""How much privacy a record has left: the epsilon of all that was released of it.

Two data sets are adjacent if one record of the first is replaced in the second, by one with as many tokens and as many
labelled tokens: the server sees both numbers, and the second scales the gradients of the whole batch. A release is a
record's rows, clipped to a norm of C, plus Gaussian noise of `noise_multiplier` x C. Replacing the record moves the
rows by up to 2 C, so the noise is `noise_multiplier / 2` of the sensitivity. k such releases, each of which may depend
on those before, are together as private as a single one with a k-th of the noise's variance. That is exact, and so is
the epsilon of the Gaussian mechanism (Balle and Wang 2018), which `dp-accounting` computes. Batches are not secret
samples, so sampling amplifies nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

from megatron_mux.errors import UserError


@dataclass(frozen=True)
class Releases:
    """How often a record leaves the client.

    Attributes:
        activations: Forward passes with it, those of evaluations included.
        gradients: Backward passes.
    """

    activations: int
    gradients: int

    @classmethod
    def of_training(cls, records: int, batch: int, steps: int, evaluations: int = 0) -> Releases:
        """Count the releases of the training record that is released most often.

        Each epoch releases each record once, its last batch may be short.

        Args:
            records: Of the training data.
            batch: Records of an optimizer step.
            steps: Optimizer steps.
            evaluations: Forward passes with each record in evaluations: their number times the candidates that a
                record is scored with. 0 if evaluations have other records than the training; those records then
                spend `Releases(evaluations, 0)`.
        """
        epochs = math.ceil(steps / math.ceil(records / batch))
        return cls(epochs + evaluations, epochs)

    @property
    def total(self) -> int:
        """Releases of either kind."""
        return self.activations + self.gradients


def epsilon_of(noise_multiplier: float, releases: Releases, delta: float) -> float:
    """The epsilon that releases spend.

    Args:
        noise_multiplier: Standard deviation of the noise relative to the clipping norm; 0: no noise.
        releases: Of a record.

    Raises:
        UserError: The library is not installed.
    """
    if not releases.total:
        return 0.0
    noise = noise_multiplier / (2 * math.sqrt(releases.total))
    return float(_library().get_epsilon_gaussian(noise, delta))


def multiplier_for(epsilon: float, releases: Releases, delta: float) -> float:
    """The noise multiplier with which releases spend `epsilon`: the inverse of `epsilon_of`.

    Raises:
        UserError: The library is not installed.
    """
    return 2 * math.sqrt(releases.total) * float(_library().get_sigma_gaussian(epsilon, delta))


def _library() -> ModuleType:
    try:
        from dp_accounting import gaussian_mechanism
    except ImportError:
        raise UserError(
            "Noise on what leaves the client needs dp-accounting: pip install dp-accounting"
        ) from None
    module: ModuleType = gaussian_mechanism
    return module
