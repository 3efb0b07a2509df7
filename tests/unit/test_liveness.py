"""Who is blamed when ranks no longer get on, and how ranks tell each other."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.errors import is_of_a_connection
from megatron_mux.liveness.endpoint import Hub, Spoke
from megatron_mux.liveness.heartbeat import Activity, State, waits_for_others
from megatron_mux.liveness.verdict import FailureDetector, RankView, Verdict
from megatron_mux.pipeline.action import Action

TIMEOUT = 100.0
DETECTOR = FailureDetector(TIMEOUT)

seconds = st.floats(0.0, 3 * TIMEOUT)


def working(name: str, at: float, long: bool = False) -> RankView:
    return RankView(name, State(f"what {name} does", "file.py:1", long, at))


def waiting(name: str, waited: float) -> RankView:
    return RankView(name, State("an action", "", False, waited, waited))


# -- verdicts


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 0.99 * TIMEOUT), min_size=1), st.lists(st.floats(0.0, 0.99 * TIMEOUT)))
def test_ranks_that_get_on_are_left_alone(works: list[float], waits: list[float]) -> None:
    ranks = [working("a", at) for at in works] + [waiting("b", waited) for waited in waits]
    assert DETECTOR(ranks) is None
    assert DETECTOR([*ranks, RankView("c", State("", "", True, 0.0, end="done"), 9e9, closed=True)]) is None


@settings(deadline=None)
@given(st.floats(TIMEOUT, 3 * TIMEOUT), st.lists(st.floats(0.0, 2 * TIMEOUT), max_size=4))
def test_who_waits_is_not_to_blame(at: float, waits: list[float]) -> None:
    ranks = [*(waiting(f"w{i}", waited) for i, waited in enumerate(waits)), working("culprit", at)]
    verdict = DETECTOR(ranks)
    assert verdict is not None and verdict.rank == len(waits)
    assert verdict.text.startswith("culprit has been at 'what culprit does' (file.py:1) for ")
    assert ("while others wait" in verdict.text) == bool(waits)
    assert not any(f"w{i}" in verdict.text for i in range(len(waits)))


@settings(deadline=None)
@given(st.lists(seconds, min_size=1, max_size=6))
def test_of_several_that_work_the_first_to_halt_is_named(at: list[float]) -> None:
    verdict = DETECTOR([waiting("w", TIMEOUT), *(working(f"rank {i}", one) for i, one in enumerate(at))])
    assert verdict is not None and verdict.rank is not None
    assert f"rank {at.index(max(at))} has been at" in verdict.text
    for i, one in enumerate(at):
        assert (f"rank {i} has been at" in verdict.text) == (one > max(at) - 1.0)


def test_what_may_take_long_may_as_long_as_nobody_waits_too_long() -> None:
    assert DETECTOR([working("a", 9 * TIMEOUT, long=True), waiting("b", 0.9 * TIMEOUT)]) is None
    verdict = DETECTOR([working("a", 9 * TIMEOUT, long=True), waiting("b", TIMEOUT)])
    assert verdict is not None and verdict.rank == 0


def test_when_all_wait_all_are_named() -> None:
    verdict = DETECTOR([waiting("a", TIMEOUT), waiting("b", TIMEOUT)])
    assert verdict is not None and verdict.rank is None
    assert verdict.text == "all ranks wait for each other: a at 'an action'; b at 'an action'"


@settings(deadline=None)
@given(st.floats(0.0, 2 * DETECTOR.max_silence))
def test_silence_counts_once_it_lasts(silent: float) -> None:
    verdict = DETECTOR([working("a", 0.0), RankView("b", working("b", 0.0).state, silent)])
    assert (verdict is None) == (silent < DETECTOR.max_silence)
    assert verdict is None or verdict.text == "b has not answered for 50 s"


def test_a_death_comes_before_what_follows_from_it() -> None:
    gone = RankView("gone", State("an action", "", False, 1.0), closed=True)
    failed = RankView("failed", State("", "", False, 1.0, end="failed", reason="why"))
    lost = RankView("lost", State("", "", False, 9.0, 9.0, 9.0, reason="Connection closed by peer"))
    stalled = working("stalled", 2 * TIMEOUT)
    order = [stalled, lost, failed, gone]
    while order:
        verdict = DETECTOR(order)
        assert verdict is not None and verdict.rank == len(order) - 1, order[-1].name
        order.pop()


def test_a_rank_out_of_memory_ends_the_others_at_once() -> None:
    gone = RankView("b", State("0F0.0", "", False, 1.0, end="out of memory"))
    assert DETECTOR([waiting("a", 1.0), gone]) == Verdict(1, "", patience=0.0), "it has said why"


def test_what_was_told_is_not_said_again_and_leaves_time() -> None:
    told = RankView("a", State("", "", True, 0.0, end="told"), closed=True)
    assert DETECTOR([told, waiting("b", 0.0)]) == Verdict(0, "", patience=3.0)


def test_a_lost_connection_is_given_time_and_a_timeout_blames_who_works() -> None:
    def lost(seconds: float, reason: str) -> RankView:
        return RankView("b", State("an action", "", False, 5.0, 5.0, seconds, reason=reason))

    assert DETECTOR([working("a", 5.0), lost(1.0, "Connection closed by peer")]) is None
    verdict = DETECTOR([working("a", 5.0), lost(3.0, "Connection closed by peer")])
    assert verdict == Verdict(1, "b lost its connections: Connection closed by peer")
    verdict = DETECTOR([working("a", 5.0), lost(3.0, "Timed out waiting 12000ms for recv operation")])
    assert verdict is not None and verdict.rank == 0


# -- looking at the main thread


def for_another(event: threading.Event) -> None:
    event.wait()


@pytest.fixture
def waiting_frame() -> Iterator[FrameType]:
    """The frame of a function that waits for another thread."""
    event = threading.Event()
    waiter = threading.Thread(target=for_another, args=(event,), daemon=True)
    waiter.start()
    time.sleep(0.1)
    frame = sys._current_frames()[waiter.ident or 0]
    while frame.f_back is not None and frame.f_code.co_name != "for_another":
        frame = frame.f_back
    yield frame
    event.set()


def test_waiting_is_seen_in_the_thread_itself(waiting_frame: FrameType) -> None:
    assert waits_for_others(waiting_frame)
    assert not waits_for_others(sys._getframe())
    assert waits_for_others(eval("__import__('sys')._getframe()", {"__name__": "torch.distributed.c10d"}))


def test_waiting_is_counted_without_a_break_within_one_thing(waiting_frame: FrameType) -> None:
    one, other = Activity(Action.parse("0F1.3"), False, 10.0), Activity("saving", False, 30.0)
    assert one.state(None, None, 11.0).waited is None
    assert one.state(waiting_frame, None, 12.0).waited == 0.0
    state = one.state(waiting_frame, None, 20.0)
    assert (state.what, state.seconds, state.waited) == ("0F1.3", 10.0, 8.0)
    assert other.state(waiting_frame, None, 31.0).waited == 0.0, "it got on in between"
    assert other.state(None, None, 32.0).waited is None
    lost = other.state(None, 33.0, 34.0)
    assert (lost.waited, lost.lost) == (0.0, 1.0), "a lost connection is no work"


# -- on the wire


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Spoke]]:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    hub = Hub(DETECTOR, "rank 0 (here)", 2, State("starting", "", True, 0.0))
    spoke = Spoke(DETECTOR, 1, "rank 1 (there)", "rank 0 (here)", hub.address)
    hub.accept()
    yield hub, spoke
    spoke.leave(None)
    hub.leave(None)


def soon() -> float:
    return time.monotonic() + 0.2


BUSY = State("an action", "", False, 0.0)


def test_states_arrive(pair: tuple[Hub, Spoke]) -> None:
    hub, spoke = pair
    assert spoke.exchange(BUSY, soon()) is None
    assert hub.exchange(BUSY, soon()) is None
    assert spoke.exchange(State("an action", "", False, 2 * TIMEOUT), soon()) is None
    verdict = hub.exchange(BUSY, soon())
    assert verdict is not None and verdict.text.startswith("rank 1 (there) has been at 'an action'")


@pytest.mark.parametrize("said", [b'["guessed", 1, "x"]', b"[", b"3", b"", None])
def test_strangers_are_not_heard(said: bytes | None) -> None:
    hub = Hub(DETECTOR, "rank 0 (here)", 2, State("starting", "", True, 0.0))
    with socket.create_connection(("localhost", hub.address[0])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1" if said is None else struct.pack("!i", len(said)) + said)
        spoke = Spoke(DETECTOR, 1, "rank 1 (there)", "rank 0 (here)", hub.address)
        hub.accept()
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it is put out"
        assert hub.exchange(BUSY, soon()) is None
    spoke.leave(None)
    hub.leave(None)


def test_every_rank_hears_the_verdict(pair: tuple[Hub, Spoke]) -> None:
    hub, spoke = pair
    assert hub.exchange(BUSY, soon()) is None
    verdict = Verdict(1, "rank 1 stalls", 3.0)
    telling = threading.Thread(target=hub.leave, args=(verdict,))
    telling.start()
    assert spoke.exchange(BUSY, time.monotonic() + 5) == Verdict(1, "rank 1 stalls", 3.0, said=True)
    spoke.leave(verdict)
    telling.join()


def test_a_closed_connection_is_a_death_on_either_end(pair: tuple[Hub, Spoke]) -> None:
    hub, spoke = pair
    assert hub.exchange(BUSY, soon()) is None
    spoke.leave(None)  # without a word before
    verdict = hub.exchange(BUSY, time.monotonic() + 5)
    assert verdict == Verdict(1, "rank 1 (there) is gone: killed, out of memory, or crashed")


def test_who_has_done_its_work_may_leave_first(pair: tuple[Hub, Spoke]) -> None:
    hub, spoke = pair
    done = State("", "", True, 0.0, end="done")
    assert hub.exchange(BUSY, soon()) is None
    assert spoke.exchange(done, soon()) is None
    spoke.leave(None)
    assert hub.exchange(BUSY, soon()) is None
    assert hub.exchange(BUSY, soon()) is None


def test_rank_0_may_leave_first(pair: tuple[Hub, Spoke]) -> None:
    hub, spoke = pair
    assert hub.exchange(BUSY, soon()) is None
    leaving = threading.Thread(target=hub.leave, args=(None,))
    leaving.start()
    assert spoke.exchange(BUSY, time.monotonic() + 5) is None and spoke.over
    spoke.leave(None)
    leaving.join()


def test_a_bell_ends_a_beat(pair: tuple[Hub, Spoke]) -> None:
    for post in pair:
        post.wake()
        start = time.monotonic()
        assert post.exchange(BUSY, start + 30) is None
        assert time.monotonic() - start < 10


# -- errors


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4",
            True,
        ),
        ("Timed out waiting 12000ms for recv operation to complete", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_errors_of_connections_are_told_from_others(text: str, wanted: bool) -> None:
    assert is_of_a_connection(RuntimeError(text)) == wanted
