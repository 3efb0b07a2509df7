"""The simulator agrees with what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mux.split.policies import POLICIES, PolicyName
from megatron_mux.split.simulation import Costs, Figures, Fleet, ServerOptions, Simulation

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
STEP = 2 * 0.01 + 100 * 1e-4 + 0.01 + 100 * 3e-4  # forward and backward
TRANSFERS = 4 * (0.05 + 100 * 2e3 / 1e6)
CLIENT = 3 * 100 * 1e-4


def simulate(
    fleet: Fleet, capacity: int = ROOMY, policy: PolicyName = "on-demand", together: int = 0
) -> Figures:
    return Simulation(COSTS, fleet, ServerOptions(capacity, policy, most_together=together)).run()


def test_a_lone_clients_step_is_the_sum_of_its_parts() -> None:
    found = simulate(ONE)
    assert found.steps == 5
    assert found.computation_s == pytest.approx(STEP)
    assert found.communication_s == pytest.approx(TRANSFERS)
    assert found.waiting_s.max() == 0.0
    # After the last step the client does not compute its first layers again.
    assert found.step_s[0] == pytest.approx(STEP + TRANSFERS + CLIENT - 100 * 1e-4 / 5, rel=1e-9)


def test_a_saturated_server_computes_all_the_time() -> None:
    fleet = replace(ONE, clients=200, steps=20)
    found = simulate(fleet)
    assert found.steps == 4000
    assert found.steps / found.seconds == pytest.approx(1 / STEP, rel=0.01)
    assert found.jain > 0.99


def test_computing_together_pays_the_call_once() -> None:
    fleet = replace(ONE, clients=200, steps=20)
    alone, together = simulate(fleet), simulate(fleet, together=1000)
    rows = 100 * (1e-4 + 3e-4)
    assert together.together > 5
    assert together.steps / together.seconds == pytest.approx(1 / (rows + 0.03 / together.together), rel=0.05)
    assert together.seconds < alone.seconds


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_within_memory(policy: PolicyName) -> None:
    fleet = replace(ONE, clients=12, steps=4, drops=0.1, away_s=1.0, arrivals_s=0.1)
    whole = 1_000_000_000 + 1_000_000 + 100_000_000
    capacity = 12 * 1_000_000 + 250_000_000 if policy != "vanilla" else whole + whole // 2
    found = simulate(fleet, capacity, policy)
    assert found.steps == 48
    assert found.most_reserved <= capacity


def test_what_is_preserved_makes_others_wait() -> None:
    fleet = replace(ONE, clients=16, steps=6)
    capacity = 16 * 1_000_000 + 210_000_000
    on_demand, preserve = (simulate(fleet, capacity, policy) for policy in ("on-demand", "preserve"))
    assert preserve.waiting_s.mean() > 5 * on_demand.waiting_s.mean()


def test_the_seed_decides_everything() -> None:
    fleet = Fleet(clients=30, steps=3, arrivals_s=0.5, drops=0.1)
    first, again, other = simulate(fleet), simulate(fleet), simulate(replace(fleet, seed=1))
    assert first.seconds == again.seconds != other.seconds
