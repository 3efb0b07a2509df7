"""Which jobs may have ended an instance: those that were on it are tried again in halves until one is left.

Two numbers a job are kept, and both are set to 0 as soon as the job completes a step further than any that it had done
before the death: `suspects`, how many jobs were blamed together when an instance last died with it, and `lone_deaths`.

If an instance that holds jobs in suspicion dies, these alone are blamed, since every other job on it has completed a
step since its own last death. No more than half of the suspects of a death are together on an instance again, so each
death at least halves them. Where that half is one, the job has the instance for itself, and whoever is alone twice when
an instance dies fails: one bad job among n is found after at most log2(n) + 1 further deaths.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_mux.serve.dispatcher.view import JobView

LONE_DEATHS = 2
"""A job that was alone on so many instances in a row that died without progress is failed."""


def blame(jobs: Sequence[JobView]) -> dict[str, tuple[int, int]]:
    """Say who is in suspicion because an instance died.

    Args:
        jobs: All that were on it.

    Returns:
        New `suspects` and `lone_deaths` of the jobs to blame, by id; the others keep theirs.
    """
    blamed = [job for job in jobs if job.suspects] or jobs
    alone = len(jobs) == 1
    return {job.id: (len(blamed), job.lone_deaths + alone) for job in blamed}


def needs_instance_alone(job: JobView) -> bool:
    """Whether a job may be on an instance only by itself."""
    return 0 < job.suspects <= 3


def may_join(job: JobView, suspects: Collection[JobView], others: int) -> bool:
    """Whether suspicion allows a job to be on an instance with jobs in suspicion, and so many others."""
    if not job.suspects:
        return not suspects
    if not suspects and not others:
        return True
    if needs_instance_alone(job) or any(needs_instance_alone(other) for other in suspects):
        return False
    return len(suspects) < min(other.suspects // 2 for other in (job, *suspects))
