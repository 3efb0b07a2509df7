"""What holds of every kind in the registry without a line of its own here, and how a wrong kind is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import pytest

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.adapters.registry import KINDS, by_type
from megatron_mux.adapters.tensors import AdapterTensor
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.shape import BackboneShape, Module
from tests.end_to_end import test_export, test_isolation, test_memory_tables, test_parity
from tests.end_to_end.families import FAMILIES
from tests.end_to_end.table_cases import KINDS as MEMORY_KINDS
from tests.unit.adapters import test_peft_format
from tests.unit.adapters.toy import mixture, sizes

LLAMA = FAMILIES["llama"]
PEFTS = {name for name, kind in KINDS.items() if kind.in_peft}


def named(sections: Iterable[Mapping[str, Any]]) -> set[str]:
    return {section["peft_type"] for section in sections}


TESTED: dict[str, Callable[[], set[str]]] = {
    "unit/adapters/toy.py": lambda: {task.adapter.peft_type for task in mixture()},
    "end_to_end/test_isolation.py": lambda: named(test_isolation.kinds(LLAMA).values()),
    "end_to_end/test_parity.py": lambda: named(test_parity.other_kinds(LLAMA)),
    "end_to_end/test_memory_tables.py": lambda: named(
        MEMORY_KINDS[kind]["adapter"] for case in test_memory_tables.CASES for kind in case.kinds
    ),
}
OF_PEFT: dict[str, Callable[[], set[str]]] = {
    "end_to_end/test_export.py": lambda: named(test_export.sections("llama").values()),
    "unit/adapters/test_peft_format.py": lambda: {
        task.adapter.peft_type for task in test_peft_format.PEFT.values()
    },
}


@pytest.mark.parametrize("file", TESTED)
def test_every_kind_is_tested(file: str) -> None:
    assert not KINDS.keys() - TESTED[file](), f"add these kinds to tests/{file}"


@pytest.mark.parametrize("file", OF_PEFT)
def test_every_kind_of_peft_is_compared_with_it(file: str) -> None:
    assert not PEFTS - OF_PEFT[file](), f"add these kinds to tests/{file}"


@pytest.mark.parametrize("kind", KINDS)
def test_seconds_of_a_kind_are_kept_under_its_own_name(kind: str) -> None:
    measured, shared = set(), set()
    for sample in KINDS[kind].samples():
        for op in BASE_OPS:
            curve = sample.section(op, ["module"]).curve(1)
            assert curve is not None
            measured.add(curve.name)
            shared |= {curve.name} if sample.paired else set()
    assert all(name == kind or name.startswith(f"{kind}_") for name in measured)
    assert measured == shared, "two of a kind are measured together, too"


class Unfinished(AdapterSpec):
    """A kind that says next to nothing."""

    peft_type: Literal["UNFINISHED"]
    """The method."""


class Crosswise(LoraSpec):
    """Divides the wrong dimension."""

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`."""
        found = super().module_tensors(module, shape)
        return {name: AdapterTensor(t.shape, t.layer, t.init, dim=0) for name, t in found.items()}


def test_the_registry_names_what_a_kind_lacks() -> None:
    unfinished: Any = Unfinished  # mypy would not let it in
    with pytest.raises(ValueError, match="UNFINISHED lacks curve, refused, run_time, samples, work"):
        by_type([unfinished])


def test_the_registry_refuses_two_kinds_of_one_name() -> None:
    with pytest.raises(ValueError, match="two adapter kinds are called LORA"):
        by_type([LoraSpec, Crosswise])


def test_a_tensor_is_divided_as_its_module_is() -> None:
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight: tensor ranks divide 24 features"):
        Crosswise(peft_type="LORA", target_modules=["q_proj"]).tensors(sizes())
