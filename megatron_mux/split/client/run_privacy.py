"""What protects the tensors that a client's run sends: noise, scaled by how often each record leaves."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.locate import files_of
from megatron_mux.engine import Task
from megatron_mux.split.client.options import ClientOptions
from megatron_mux.split.client.remote import Privacy
from megatron_mux.split.client.request_sizes import choices_scored
from megatron_mux.split.privacy.accountant import Releases
from megatron_mux.split.privacy.noise import Noise, read_secret
from megatron_mux.split.privacy.noise import Privacy as PrivacySection

Say = Callable[[str], None]


def privacy_of_run(options: ClientOptions, task: Task, say: Say) -> Privacy | None:
    """Make what protects a client's tensors, from a section of clipping norms and noise.

    The secret that noise is made from stays beside the client's saves, so that a run that is continued sends the same.
    """
    if options.privacy is None or not isinstance(options.privacy, PrivacySection):
        return options.privacy
    spec, secret = task.spec, secrets.token_bytes(32)
    if options.save is not None:
        folder = options.save / spec.name
        folder.mkdir(parents=True, exist_ok=True)
        secret = read_secret(folder / "noise.secret")
    steps = spec.total_steps(len(task.data))
    evaluated = _evaluations(task, steps)
    same = spec.eval is not None and _share_a_file(spec.eval, *spec.data.sources)
    planned = Releases.of_training(
        len(task.data), spec.sequences_per_step, steps, evaluated.activations if same else 0
    )
    noise = Noise(options.privacy, secret, planned)
    others = f", {noise.spent(evaluated):.3g} for an evaluated one's, {evaluated.total} times"
    say(
        f"{spec.name}: noise of {noise.noise_multiplier:.3g} times the clipping norms: epsilon "
        f"{noise.spent(planned):.3g} at delta {options.privacy.delta:g} for a record's own rows, which leave "
        f"{planned.total} times{others if evaluated.total and not same else ''} (docs/split-privacy.md says what that "
        "does not cover)"
    )
    return noise


def _share_a_file(held_out: DataSource, *sources: DataSource) -> bool:
    """Whether records may be both learned and held out."""
    theirs = files_of(held_out)
    return any(file.samefile(other) for source in sources for file in files_of(source) for other in theirs)


def _evaluations(task: Task, steps: int) -> Releases:
    """How often evaluations release one of their records: each time, with every completion that is scored."""
    if task.evaluation is None or task.spec.eval is None:
        return Releases(0, 0)
    rounds = 2 + (steps - 1) // task.spec.eval.eval_steps  # before the first step and at the end, too
    return Releases(rounds * len(choices_scored(task) or "1"), 0)
