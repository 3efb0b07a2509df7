"""Sessions are let in only while everyone's requests can run in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.admission import AdmissionController
from megatron_mux.split.server.scheduler import Demand, Scheduler
from megatron_mux.split.server.session_memory import Memory

CAPACITY = 100


def memory(lasting: int, backward: int, hidden: int = 1, forward: int = 1) -> Memory:
    return Memory(1, forward, 0, backward, hidden, lasting)


def test_sessions_that_fit_alone_may_not_fit_together() -> None:
    room = AdmissionController(CAPACITY)
    room.claim("one", memory(10, 80), 1)
    with pytest.raises(RefusedError, match="1 sessions use") as refused:
        room.claim("two", memory(15, 70), 1)  # its backward pass fits beside the first; the first's does not
    assert refused.value.code == "full"
    assert refused.value.retry
    room.claim("three", memory(5, 80), 1)
    room.leave("one")
    room.claim("two", memory(10, 70), 1)


def test_what_does_not_fit_alone_is_refused_for_good() -> None:
    with pytest.raises(RefusedError) as refused:
        AdmissionController(CAPACITY).claim("one", memory(10, 90), 1)
    assert refused.value.code == "too_large"
    with pytest.raises(RefusedError, match="evaluation") as refused:
        AdmissionController(CAPACITY).claim(
            "one", memory(10, 80), 60
        )  # rows of an evaluation: 60 times forward and hidden
    assert refused.value.code == "too_large"


def test_a_client_has_a_share_of_the_memory() -> None:
    room = AdmissionController(CAPACITY, share=0.5)
    room.claim("one/a", memory(10, 30), 1)
    with pytest.raises(RefusedError, match="1 others of this client") as refused:
        room.claim("one/b", memory(10, 30), 1)
    assert refused.value.code == "too_many" and refused.value.retry
    with pytest.raises(RefusedError, match="--max-memory-each") as refused:
        room.claim("two/a", memory(10, 50), 1)
    assert refused.value.code == "too_large"
    room.claim("two/a", memory(10, 30), 1)
    room.leave("one/a")
    room.claim("one/b", memory(10, 30), 1)


@given(
    st.lists(
        st.builds(memory, st.integers(0, 30), st.integers(1, 90), st.integers(0, 10), st.integers(0, 60)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_all_requests_of_those_let_in_run_in_the_end(wanted: list[Memory], random: object) -> None:
    """Forward passes keep their input while they wait for their backward's memory, in any order of arrival."""
    room, scheduler, left, keys = AdmissionController(CAPACITY), Scheduler(CAPACITY), {}, iter(range(1, 1000))
    for i, one in enumerate(wanted):
        try:
            room.claim(str(i), one, 1)
        except RefusedError:
            continue
        left[str(i)] = one
        scheduler.submit(Demand(-i - 1, str(i), one.lasting), 0.0)
    assert len(scheduler.grant(0.0)) == len(left)
    todo, held, running = dict.fromkeys(left, 3), dict[str, int](), dict[int, tuple[str, bool]]()
    for _ in range(1000):
        idle = [n for n in todo if todo[n] and n not in {name for name, _ in running.values()}]
        if idle:
            name = random.choice(idle)  # type: ignore[attr-defined]
            one, backward, key = left[name], name in held, next(keys)
            size = one.backward if backward else one.forward + one.hidden
            running[key] = name, backward
            scheduler.submit(Demand(key, name, size), 0.0)
            scheduler.grant(0.0)
        granted = [key for key in running if scheduler.has_reserved(key)]
        assert granted or idle or not any(todo.values()), "all wait for each other"
        if granted and (not idle or random.random() < 0.5):  # type: ignore[attr-defined]
            key = random.choice(granted)  # type: ignore[attr-defined]
            name, backward = running.pop(key)
            if backward:
                scheduler.release(held.pop(name), 0.0)
                scheduler.release(key, 0.0)
                todo[name] -= 1
            else:
                scheduler.shrink(key, left[name].hidden)
                held[name] = key
            scheduler.grant(0.0)
    assert not any(todo.values())
