"""What a unit of frozen weights keeps between uses."""

from __future__ import annotations

from megatron_mux.backbone.weight_unit import FetchedBytes, WeightUnit


def bytes_of(unit: WeightUnit) -> FetchedBytes:
    """The bytes that a unit keeps; it keeps some unless all of it is resident as it is."""
    assert unit.fetched is not None
    return unit.fetched
