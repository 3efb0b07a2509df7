"""Callbacks are called in their order, and only at the moments that they override."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_mux.training.callback import Callback, overrides, save_run


class Saves(Callback):
    """Notes when it is to save."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def before_save(self) -> None:
        self.noted.append(f"{self.name} waits")

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        self.noted.append(f"{self.name} saves {', '.join(names or ())} without {', '.join(leaving)}")


class Steps(Saves):
    """Is told of steps, too."""

    def after_steps(self, steps: int) -> None:
        self.noted.append(f"{self.name}: {steps}")


def test_who_does_nothing_at_a_moment_is_left_out() -> None:
    noted: list[str] = []
    callbacks = [Steps("a", noted), Saves("b", noted), Callback(), Steps("c", noted)]
    moments = overrides(callbacks, Callback.after_steps)
    assert len(moments) == 2 and not overrides(callbacks, Callback.around_steps)
    for moment in moments:
        moment(3)
    assert noted == ["a: 3", "c: 3"]


def test_all_get_ready_before_any_saves() -> None:
    noted: list[str] = []
    save_run([Saves("a", noted), Callback(), Saves("b", noted)], ["task", "left"], ["left"])
    assert noted == [
        "a waits",
        "b waits",
        "a saves task, left without left",
        "b saves task, left without left",
    ]
