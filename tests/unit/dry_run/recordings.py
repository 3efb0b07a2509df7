"""What tests read off a recording of a dry run."""

from __future__ import annotations

from megatron_mux.dry_run.run_spec import STEP, Recording


def begins(recording: Recording) -> list[int]:
    """Number of events before each step."""
    return [index for index, what in recording.marks if what == STEP]


def held(recording: Recording) -> int:
    """Bytes allocated before the first step: weights, adapters, optimizers."""
    first = begins(recording)[0]
    return recording.stream.live()[first - 1] if first else 0


def last_step_peak(recording: Recording) -> int:
    """Peak bytes from the last step on."""
    return max(recording.stream.live()[max(begins(recording)[-1] - 1, 0) :], default=0)
