"""One process of a host goes first."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_mux import launcher


class Store(dict[str, str]):
    """torchrun's, as far as it is needed."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_the_leader_goes_first_whether_it_fails_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    order: list[str] = []

    def sleep(seconds: float) -> None:
        """Another process is waiting: it is the leader's turn."""
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(ValueError), launcher.local_leader_first():
            order.append("leader")
            raise ValueError
        monkeypatch.setenv("LOCAL_RANK", "1")

    monkeypatch.setattr(launcher, "launchers_store", lambda: store)
    monkeypatch.setattr("megatron_mux.launcher.time.sleep", sleep)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with launcher.local_leader_first():
        order.append("other")
    assert order == ["leader", "other"]


@pytest.mark.parametrize("problem", [KeyError, ValueError, RuntimeError, None])
def test_without_a_store_nobody_waits(monkeypatch: pytest.MonkeyPatch, problem: Any) -> None:
    def store() -> None:
        if problem is not None:
            raise problem

    monkeypatch.setattr(launcher, "launchers_store", store)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with launcher.local_leader_first():
        pass
