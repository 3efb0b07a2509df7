"""Counter-based random numbers: uniform, independent of neighbours, a function of place alone, cheap."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.kernels.dropout import keep_mask, key_of, uniform
from megatron_mux.kernels.embedding_noise import EmbeddingNoise


def places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows) // 50, torch.arange(rows) % 50


def test_masks_do_not_depend_on_packing_or_division() -> None:
    sequences, tokens = places(200)
    whole = keep_mask(key_of(1, "m"), 2, sequences, tokens, (0, 96), 0.3)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        keep_mask(key_of(1, "m"), 2, sequences[order], tokens[order], (0, 96), 0.3), whole[order]
    )
    for start, stop in ((0, 48), (48, 96), (31, 32), (31, 70)):
        part = keep_mask(key_of(1, "m"), 2, sequences, tokens, (start, stop), 0.3)
        assert torch.equal(part, whole[:, start:stop])


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_share_of_kept_entries(probability: float) -> None:
    rows, features = 500, 400
    mask = keep_mask(key_of("share"), 0, *places(rows), (0, features), probability).double()
    deviation = (probability * (1 - probability) / (rows * features)) ** 0.5
    assert abs(mask.mean() - (1 - probability)) < 4.5 * deviation
    for dim, count in ((0, rows), (1, features)):
        spread = mask.mean(dim).std() / (probability * (1 - probability) / count) ** 0.5
        assert 0.85 < spread < 1.15


def test_neighbours_are_uncorrelated() -> None:
    sequences, tokens = places(1000)
    mask = keep_mask(key_of(5, "m"), 1, sequences, tokens, (0, 256), 0.5).double() * 2 - 1
    pairs = {
        "feature": (mask[:, 1:], mask[:, :-1]),
        "feature pair": (mask[:, 2:], mask[:, :-2]),
        "token": (mask[1:], mask[:-1]),
        "sequence": (mask[50:], mask[:-50]),
        "step": (mask, keep_mask(key_of(5, "m"), 2, sequences, tokens, (0, 256), 0.5).double() * 2 - 1),
        "seed": (mask, keep_mask(key_of(6, "m"), 1, sequences, tokens, (0, 256), 0.5).double() * 2 - 1),
        "module": (mask, keep_mask(key_of(5, "n"), 1, sequences, tokens, (0, 256), 0.5).double() * 2 - 1),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 4.5 / a.numel() ** 0.5, name
    # Four corners of a rectangle: what an additive generator would betray.
    corners = mask[1:, 2:] * mask[:-1, 2:] * mask[1:, :-2] * mask[:-1, :-2]
    assert abs(corners.mean()) < 4.5 / corners.numel() ** 0.5


def test_uniform_is_uniform_and_open() -> None:
    u = uniform(key_of("u"), torch.arange(700), torch.arange(600))
    assert u.dtype == torch.float32 and u.min() > 0 and u.max() < 1
    counts = torch.histc(u, bins=100, min=0, max=1).double()
    expected = u.numel() / 100
    chi = ((counts - expected) ** 2 / expected).sum()
    assert 50 < chi < 160  # 99 degrees of freedom
    assert abs((u[1:] * u[:-1]).mean() - 0.25) < 4e-3 and abs((u[:, 1:] * u[:, :-1]).mean() - 0.25) < 4e-3
    part = uniform(key_of("u"), torch.arange(700)[3::7], torch.arange(600)[100:300])
    assert torch.equal(part, u[3::7, 100:300])


def test_known_values_stay() -> None:
    """Masks are part of what a resumed run repeats: they must never change between versions."""
    assert key_of(1, "a") == key_of(1, "a") != key_of("1a")
    mask = keep_mask(key_of(1, "m"), 2, torch.tensor([0, 3]), torch.tensor([1, 2]), (0, 16), 0.5)
    assert ["".join(str(int(b)) for b in row) for row in mask] == ["1000100000110000", "0110111010100111"]


def test_noise_on_embeddings_is_uniform_in_its_bounds_and_depends_on_its_place_alone() -> None:
    noise = EmbeddingNoise(key_of(3, "neftune"), 5.0, lambda step: [64, 16])
    ids, index = torch.tensor([0] * 64 + [1] * 16), torch.cat([torch.arange(64), torch.arange(16)])
    found = noise.of(7, ids, index, 128)
    for rows, length in ((slice(0, 64), 64), (slice(64, 80), 16)):
        bound = 5.0 / (length * 128) ** 0.5
        own = found[rows]
        assert 0.99 * bound < own.abs().max() <= bound
        assert abs(float(own.mean())) < 0.05 * bound and float(own.var()) == pytest.approx(
            bound**2 / 3, rel=0.05
        )
    chosen = torch.tensor([70, 3])
    assert torch.equal(noise.of(7, ids[chosen], index[chosen], 128), found[chosen])
    assert not torch.equal(noise.of(8, ids, index, 128), found)
