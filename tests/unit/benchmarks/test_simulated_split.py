"""The simulator agrees with what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_split.fleet import Costs, Figures, Fleet, Part, ServerOptions
from benchmarks.simulated_split.simulate import Simulation
from megatron_mux.split.server.policies import POLICIES, PolicyName
from megatron_mux.split.server.scheduler import SchedulerOptions

COSTS = Costs(
    forward_call_s=0.01,
    forward_row_s=1e-4,
    backward_call_s=0.02,
    backward_row_s=3e-4,
    kept_call_s=0.01,
    kept_row_s=2e-4,
    forward_row_bytes=1e4,
    backward_row_bytes=1e6,
    graph_row_bytes=9e5,
    hidden_row_bytes=2e3,
    lasting_bytes=1e6,
    weights_bytes=1e9,
)
ONE = Fleet(clients=1, steps=5, rows=(100, 100), bandwidth=1e6, spread=0.0, latency_s=0.05, client_row_s=1e-4)
ROOMY = 10**12
FORWARD, BACKWARD = 0.01 + 100 * 1e-4, 0.02 + 100 * 3e-4
PROFILE = 3 * FORWARD + BACKWARD
TRANSFER, CLIENT = 0.05 + 100 * 2e3 / 1e6, 100 * 1e-4
ALONE = FORWARD + BACKWARD + 4 * TRANSFER + 3 * CLIENT
WHOLE = 1_000_000_000 + 1_000_000 + 100_000_000


def simulate(
    fleet: Fleet, capacity: int = ROOMY, policy: PolicyName = "on-demand", together: int = 0
) -> Figures:
    return Simulation(COSTS, fleet, ServerOptions(capacity, policy, most_together=together)).run()


def test_a_lone_clients_step_is_the_sum_of_its_parts() -> None:
    found = simulate(ONE)
    assert found.steps == pytest.approx(
        np.array([[4 * TRANSFER, FORWARD + BACKWARD, 0.0, 3 * CLIENT, 0.0]] * 5)
    )
    assert found.seconds == pytest.approx(PROFILE + 5 * ALONE)
    assert found.joining_s == pytest.approx([PROFILE])
    assert found.progress == pytest.approx([1.0])
    assert found.most_reserved == 1_000_000 + 100_000_000 + 200_000


def test_a_saturated_server_computes_all_the_time() -> None:
    found = simulate(replace(ONE, clients=200, steps=20))
    assert found.busy_s == pytest.approx(200 * PROFILE + 4000 * (FORWARD + BACKWARD))
    assert found.seconds == pytest.approx(found.busy_s, rel=0.01)
    assert found.jain > 0.99


def test_waiting_is_that_of_a_queue_with_one_server() -> None:
    """Requests of many clients are a Poisson process, so Pollaczek and Khinchine's formula holds."""
    gap, works = 0.5, (PROFILE, FORWARD, BACKWARD)
    found = simulate(replace(ONE, clients=8000, steps=1, arrivals_s=gap, latency_s=30.0))
    load = sum(works) / gap
    wait = sum(work**2 for work in works) / gap / (2 * (1 - load))
    assert found.steps[:, Part.SCHEDULING].mean() == pytest.approx(2 * wait, rel=0.1)


def test_computing_together_pays_the_call_once() -> None:
    fleet = replace(ONE, clients=200, steps=20)
    alone, together = simulate(fleet), simulate(fleet, together=1000)
    assert alone.together == 1.0 and together.together > 5
    rows = 100 * (1e-4 + 3e-4)
    calls = 0.03 / together.together
    assert together.busy_s == pytest.approx(200 * PROFILE + 4000 * (rows + calls), rel=0.02)
    assert together.steps_per_s > alone.steps_per_s


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_within_memory(policy: PolicyName) -> None:
    fleet = replace(ONE, clients=12, steps=4, drops=0.1, away_s=1.0, arrivals_s=0.1)
    capacity = 12 * 1_000_000 + 250_000_000 if policy != "vanilla" else WHOLE + WHOLE // 2
    found = simulate(fleet, capacity, policy)
    assert len(found.steps) == 48 and (found.steps >= 0).all()
    assert 0 < found.most_reserved <= capacity
    assert found.steps[:, Part.AWAY].max() > 0


@pytest.mark.parametrize("policy", ["on-demand", "reforward-with-gradients", "preserve", "auto"])
def test_sessions_wait_outside_where_all_of_them_would_lock_memory(policy: PolicyName) -> None:
    """What more than 20 sessions hold while they wait for backward passes would leave no room for any of these."""
    found = simulate(replace(ONE, clients=300, steps=2), 20 * 1_200_000 + 100_000_000, policy)
    assert len(found.steps) == 600


def test_what_is_preserved_makes_others_wait() -> None:
    fleet = replace(ONE, clients=16, steps=6)
    capacity = 16 * 1_200_000 + 200_000_000
    on_demand, preserve = (
        simulate(fleet, capacity, policy).steps[:, Part.SCHEDULING].mean()
        for policy in ("on-demand", "preserve")
    )
    assert preserve > 5 * on_demand


def test_vanilla_swaps_whole_tasks() -> None:
    """Two take turns: each time one goes out, the other comes in, and holds the memory from forward to backward."""
    swap = (1_000_000_000 + 1_000_000) / 8e9
    held = FORWARD + 2 * TRANSFER + CLIENT + 0.01 + 100 * 2e-4
    fleet = replace(ONE, clients=2, steps=50)
    found = simulate(fleet, WHOLE + WHOLE // 2, "vanilla")
    assert found.seconds == pytest.approx(100 * (2 * swap + held), rel=0.03)
    slow = replace(fleet, client_row_s=0.1, arrivals_s=7.0)
    waits = simulate(slow, WHOLE + WHOLE // 2, "vanilla").steps[:, Part.SCHEDULING]
    assert waits.max() < held - CLIENT + 10.0 + 4 * swap, "a task between two steps makes room at once"
    both = simulate(fleet, 2 * WHOLE, "vanilla")
    assert both.steps[:, Part.SCHEDULING].max() < 2 * (FORWARD + BACKWARD), (
        "nothing is swapped where both fit"
    )


def test_a_rate_limit_is_a_rate() -> None:
    """A step has a forward and a backward pass of 100 tokens each."""
    options = ServerOptions(ROOMY, scheduler=SchedulerOptions(rate=100.0))
    found = Simulation(COSTS, replace(ONE, steps=50), options).run()
    assert found.steps_per_s == pytest.approx(0.5, rel=0.05)


def test_the_seed_decides_everything() -> None:
    fleet = Fleet(clients=30, steps=3, arrivals_s=0.5, drops=0.1)
    first, again, other = simulate(fleet), simulate(fleet), simulate(replace(fleet, seed=1))
    assert (first.steps == again.steps).all()
    assert first.seconds == again.seconds != other.seconds


def test_a_client_that_cannot_fit_is_refused() -> None:
    for policy, capacity in (("on-demand", 101_000_000), ("vanilla", WHOLE - 1)):
        with pytest.raises(ValueError, match="needs"):
            simulate(ONE, capacity, policy)  # type: ignore[arg-type]
