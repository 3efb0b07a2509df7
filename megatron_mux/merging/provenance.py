"""The backbone that an adapter was trained on, as the header of its file of tensors says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_mux.adapters.peft_format import CONFIG, WEIGHTS
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.quantised.scheme import METHODS, QuantMethod

_KEY = "backbone_"
_DIGITS = 16


@dataclass(frozen=True)
class Provenance:
    """What an adapter's file says of its backbone; all empty if it says nothing, as those of peft.

    Attributes:
        fingerprint: See `BackboneInfo`.
        quantised: How its weights were quantised on load: one of `METHODS`; empty: not at all.
        dtype: The dtype to which they were rounded before that: `bfloat16`.
        device: The kind of device that computed: `cuda`.
    """

    fingerprint: str = ""
    quantised: str = ""
    dtype: str = ""
    device: str = ""

    @classmethod
    def read(cls, adapter: Path) -> Provenance:
        """Of an adapter's directory; says nothing if its file cannot be read."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(adapter / WEIGHTS, framework="pt") as file:
                header = file.metadata() or {}
        except (OSError, SafetensorError):
            return cls()  # said where the tensors are read
        return cls(**{name: header.get(_KEY + name, "") for name in cls.__dataclass_fields__})

    @property
    def header(self) -> dict[str, str]:
        """Entries of the header of the adapter's file."""
        return {_KEY + name: value for name, value in asdict(self).items() if value}

    @property
    def method(self) -> QuantMethod | None:
        """How the backbone was quantised on load; None: it was not, or that is not known."""
        return next((method for method in METHODS if method == self.quantised), None)

    @property
    def rounded_to(self) -> torch.dtype | None:
        """The dtype to which weights were rounded before they were quantised; None: not known."""
        found = getattr(torch, self.dtype, None) if self.dtype else None
        return found if isinstance(found, torch.dtype) else None


def check_backbone(adapter: Path, info: BackboneInfo, warn: Callable[[str], None]) -> Provenance:
    """Compare a backbone with the one that an adapter was trained on.

    Args:
        adapter: The adapter's directory.
        info: The backbone that it is used with.
        warn: Told of another backbone.

    Raises:
        UserError: It is the same checkpoint, quantised on load in another way.
    """
    found = Provenance.read(adapter)
    if found.fingerprint in ("", info.fingerprint):
        return found
    quantisation = info.shape.quantisation
    is_stored = quantisation is not None and not quantisation.is_made
    if not is_stored and read_backbone_info(info.path, found.method).fingerprint == found.fingerprint:
        advice = f"give --backbone-dtype {found.method}" if found.method else "leave out --backbone-dtype"
        how = f"quantised on load in {found.method}" if found.method else "as it is stored, not quantised"
        raise UserError(f"{adapter} was trained on {info.path} {how}: {advice}")
    name = read_json(adapter / CONFIG).get("base_model_name_or_path") or "unknown"
    how = f", quantised on load in {found.method}" if found.method else ""
    warn(
        f"{adapter} was trained on another backbone ({name}, fingerprint {found.fingerprint[:_DIGITS]}{how}) than "
        f"{info.path} (fingerprint {info.fingerprint[:_DIGITS]}): results differ from those in training"
    )
    return found
