"""What the dispatcher decides. Reasons are sentences for the job's tenant and tell nothing of other tenants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """A job is to train on an instance, which may still refuse it."""

    job: str
    instance: str
    reason: str


@dataclass(frozen=True)
class Leave:
    """A job is to be saved and to leave its instance."""

    job: str
    instance: str
    reason: str


@dataclass(frozen=True)
class Launch:
    """An instance is to be started in a slot."""

    slot: int
    backbone: str
    reason: str


@dataclass(frozen=True)
class Retire:
    """An instance is to save its jobs, which wait again, and to end."""

    instance: str
    reason: str


@dataclass(frozen=True)
class Fail:
    """A job cannot be run."""

    job: str
    reason: str


@dataclass(frozen=True)
class Wait:
    """A job that is to run has to wait.

    Attributes:
        reason: Stays the same, word by word, as long as the cause does.
        predicted_start: None if nothing tells when it can start.
        before: Jobs for the same backbone that wait and come first.
    """

    job: str
    reason: str
    predicted_start: float | None
    before: int = 0


Decision = Start | Leave | Launch | Retire | Fail | Wait
