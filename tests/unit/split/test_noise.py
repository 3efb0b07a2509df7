"""Clipping, noise and what they are worth, against formulas written down a second time."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from scipy.stats import norm

from megatron_mux.errors import UserError
from megatron_mux.split.privacy.accountant import Releases, epsilon_of, multiplier_for
from megatron_mux.split.privacy.noise import Noise, Privacy, clip_records, read_secret

SECRET = bytes(range(32))
ONCE = Releases(1, 0)
LENGTHS = (3, 1, 4)
DELTA = 1e-5


def make_noise(multiplier: float = 0.5, secret: bytes = SECRET, **fields: Any) -> Noise:
    fields = {"clip_activations": 2.0, "clip_gradients": 0.01, "delta": DELTA} | fields
    return Noise(Privacy(noise_multiplier=multiplier, **fields), secret, ONCE)


def some_rows(width: int = 6) -> torch.Tensor:
    rows = torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([rows[:3], rows[3:4] * 0.01, rows[4:]])


def norms(rows: torch.Tensor) -> list[float]:
    return [float(record.norm()) for record in rows.split(LENGTHS)]


def test_records_are_scaled_down_to_the_norm_one_by_one() -> None:
    rows = some_rows()
    clipped = clip_records(rows, LENGTHS, 2.0)
    assert norms(clipped) == pytest.approx([min(2.0, each) for each in norms(rows)], rel=1e-6)
    assert norms(rows)[1] < 2.0 < norms(rows)[0]
    directions = (clipped / rows).split(LENGTHS)
    assert all(float(each.std(correction=0)) < 1e-6 for each in directions)


def test_the_gradient_is_that_of_the_clipped_rows() -> None:
    rows = some_rows().requires_grad_()

    def reference(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([record * (2.0 / record.norm()).clamp(max=1) for record in rows.split(LENGTHS)])

    weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sent = make_noise().activations(rows, LENGTHS, 0, 0)
    (found,) = torch.autograd.grad((sent * weights).sum(), rows)
    (expected,) = torch.autograd.grad((reference(rows) * weights).sum(), rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_record_of_zeros_has_a_finite_gradient() -> None:
    rows = torch.zeros(2, 3, requires_grad=True)
    clip_records(rows, [2], 1.0).sum().backward()
    assert rows.grad is not None and rows.grad.eq(1).all()


def test_the_noise_is_gaussian_of_the_stated_scale() -> None:
    lengths = (100, 300)
    noise = make_noise(0.5).activations(torch.zeros(400, 50), lengths, 0, 0)
    assert noise.dtype == torch.float32
    assert float(noise.std()) == pytest.approx(0.5 * 2.0, rel=0.02)
    assert abs(float(noise.mean())) < 0.03
    shares = [float((noise.abs() < each).float().mean()) for each in (0.5, 1.0, 2.0, 3.0)]
    assert shares == pytest.approx([2 * norm.cdf(each) - 1 for each in (0.5, 1.0, 2.0, 3.0)], abs=0.01)
    assert (
        abs(float(torch.corrcoef(torch.stack([noise[:200].flatten(), noise[200:].flatten()]))[0, 1])) < 0.04
    )
    gradients = make_noise(0.5).gradients(torch.zeros(400, 50), lengths, 0, 0)
    assert float(gradients.std()) == pytest.approx(0.5 * 0.01, rel=0.02)


def test_equal_operations_get_equal_noise_and_all_others_independent_noise() -> None:
    rows = some_rows(512).float()
    noise, clipped = make_noise(), clip_records(rows, LENGTHS, 2.0)

    def added(step: int = 3, operation: int = 5, change: float = 0.0, by: Noise = noise) -> torch.Tensor:
        return by.activations(rows + change, LENGTHS, step, operation) - clipped

    first = added()
    assert torch.equal(first, added())
    assert torch.equal(first, added(by=make_noise()))
    others = [
        added(step=4),
        added(operation=6),
        added(change=1e-6),
        added(by=make_noise(secret=SECRET[::-1])),
    ]
    others.append((noise.gradients(clipped, LENGTHS, 3, 5) - clip_records(clipped, LENGTHS, 0.01)) * 200)
    others.append(make_noise().activations(rows, (4, 0, 4), 3, 5) - clip_records(rows, (4, 0, 4), 2.0))
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1])) < 0.08


def exact_delta(noise: float, epsilon: float) -> float:
    """Balle and Wang 2018, theorem 8, for a sensitivity of 1."""
    a, b = 1 / (2 * noise), epsilon * noise
    return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b))


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 8.0])
def test_the_epsilon_of_a_release_is_that_of_a_gaussian_with_twice_the_clipping_norm(
    multiplier: float,
) -> None:
    assert exact_delta(multiplier / 2, epsilon_of(multiplier, ONCE, DELTA)) == pytest.approx(DELTA, rel=1e-6)


def test_releases_compose_as_one_with_less_noise() -> None:
    assert epsilon_of(6.0, Releases(5, 4), DELTA) == pytest.approx(epsilon_of(2.0, ONCE, DELTA))
    assert epsilon_of(6.0, Releases(0, 9), DELTA) == pytest.approx(epsilon_of(6.0, Releases(9, 0), DELTA))
    assert epsilon_of(2.0, Releases(0, 0), DELTA) == 0
    assert epsilon_of(0.0, ONCE, DELTA) == math.inf


def test_the_accountants_of_the_library_agree() -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    replacement = dp_accounting.NeighboringRelation.REPLACE_ONE
    found = epsilon_of(6.0, Releases(5, 4), DELTA)
    # Of this accountant an event's multiplier is relative to the clipping norm: it doubles the sensitivity itself.
    losses = PLDAccountant(replacement).compose(dp_accounting.GaussianDpEvent(6.0), 9)
    assert losses.get_epsilon(DELTA) == pytest.approx(found, rel=1e-4)
    # Of this one, to the sensitivity; it is an upper bound.
    moments = RdpAccountant(neighboring_relation=replacement).compose(dp_accounting.GaussianDpEvent(3.0), 9)
    assert found < moments.get_epsilon(DELTA) < 1.15 * found


def test_a_target_gives_the_noise_that_spends_it() -> None:
    planned = Releases.of_training(records=100, batch=8, steps=40, evaluations=2)
    assert planned == Releases(6, 4)  # 13 steps an epoch
    section = Privacy(clip_activations=1.0, clip_gradients=1.0, target_epsilon=3.0, delta=DELTA)
    noise = Noise(section, SECRET, planned)
    assert noise.spent(planned) == pytest.approx(3.0)
    assert noise.noise_multiplier == multiplier_for(3.0, planned, DELTA)


def test_sections_that_do_not_fit_are_refused() -> None:
    for fields in ({}, {"noise_multiplier": 1.0, "target_epsilon": 1.0}, {"noise_multiplier": -1.0}):
        with pytest.raises(ValidationError):
            Privacy.model_validate({"clip_activations": 1.0, "clip_gradients": 1.0, "delta": DELTA} | fields)


def test_without_the_library_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match="pip install dp-accounting"):
        make_noise()


def test_a_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    made = read_secret(path)
    assert read_secret(path) == made and len(made) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="has 5"):
        read_secret(path)
