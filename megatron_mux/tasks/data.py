"""The `data` section: where a task's records come from, and how they become sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megatron_mux.data.mixture import Mixing
from megatron_mux.data.section import SOURCE_REFUSED, DataSource, SourceSection
from megatron_mux.section import LARGEST_COUNT, FilePaths, Number, Refused, problem, shown


def _weight(value: float) -> float:
    if value <= 0:
        raise problem("must be more than 0: leave the source out instead")
    return value


class WeightedSource(DataSource):
    """One source of a mixture."""

    weight: Annotated[Number, AfterValidator(_weight)] | None = None
    """Share of records that come from this source, relative to the other weights; None in all sources: in turn."""


def _mixture(value: Any) -> Any:
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) or not value:
        raise problem(f"must be a list of sources, each with path and weight, got {shown(value)}")
    return value


OF_SFT: Mapping[str, Refused] = {
    "packing": Refused("sequences are laid end to end without padding anyway: leave it out"),
    "dataset_text_field": Refused("write data.columns: {text: NAME}", (None, "text")),
    "assistant_only_loss": Refused(
        "of messages only the assistant's are learned: leave it out", (None, True)
    ),
    "completion_only_loss": Refused(
        "of a prompt and completion only the completion is learned, of a text everything: leave it out",
        (None, True),
    ),
}
"""Fields of TRL's SFTConfig for data, which are refused in the sections `data` and `training`."""


class DataSpec(SourceSection):
    """The training data of a task."""

    path: FilePaths | None = None
    """See `DataSource.path`."""
    mixture: Annotated[tuple[WeightedSource, ...], BeforeValidator(_mixture)] | None = None
    """Several sources instead of `path`, mixed as `datasets.interleave_datasets` mixes them."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """A mixture's epoch ends when its first source is used up, or when all are (smaller ones are then repeated)."""
    max_length: int = Field(default=1024, ge=2, le=LARGEST_COUNT)
    """Tokens a sequence is cut to."""
    truncation_side: Literal["right", "left"] = "right"
    """Which end of a longer sequence is cut off."""
    shuffle: bool = True
    """Each epoch in an order drawn from the task's seed; false keeps the order of the files."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **SOURCE_REFUSED,
        **OF_SFT,
        "truncation_mode": Refused(
            "write truncation_side: right (for keep_start) or left (for keep_end)", (None, "keep_start")
        ),
        "weight": Refused("belongs to a source of a mixture"),
        "probabilities": Refused("write a weight in each source of the mixture"),
    }

    @model_validator(mode="after")
    def _one_of_two(self) -> DataSpec:
        if (self.path is None) == (self.mixture is None):
            raise problem("give path, or mixture with a path in each of its sources")
        if self.mixture is None:
            if self.stopping_strategy != "first_exhausted":
                raise problem("stopping_strategy is of a mixture: leave it out")
            return self
        for field in SourceSection.model_fields:
            if field in self.model_fields_set and getattr(self, field):
                raise problem(f"{field} belongs into the sources of the mixture")
        if len({source.weight is None for source in self.mixture}) > 1:
            raise problem("mixture: give every source a weight, or none of them")
        return self

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources: one, or those of the mixture."""
        if self.mixture is not None:
            return tuple(source.source for source in self.mixture)
        return (
            DataSource.model_construct(**{name: getattr(self, name) for name in DataSource.model_fields}),
        )

    def mixing(self, seed: int) -> Mixing | None:
        """How the sources of a mixture are mixed, given the task's seed; None if there is no mixture."""
        if self.mixture is None:
            return None
        weights = [source.weight for source in self.mixture if source.weight is not None]
        return Mixing(tuple(weights) or None, self.stopping_strategy == "all_exhausted", seed)
