"""Reading `quantization_config` of a Hugging Face config: what is not known is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_mux.errors import UserError
from megatron_mux.quantised.scheme import Quantisation, QuantMethod

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_TORCHAO: dict[str, QuantMethod] = {"Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "fp8"}


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """How a checkpoint's weights are quantised; None: they are not.

    Raises:
        UserError: They are quantised in a way that cannot be read.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        _refuse("", section, "an object")
    method = section.get("quant_method")
    if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        method = "bitsandbytes"  # before transformers 4.35
    readers = {
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
        "torchao": _torchao,
        "fp8": _fp8,
    }
    if method not in readers:
        _refuse("quant_method", method, f"{', '.join(readers)}; or weights that are not quantised")
    return readers[method](section)


def _refuse(field: str, value: Any, supported: str) -> NoReturn:
    name = ".".join(filter(None, ("quantization_config", field)))
    raise UserError(
        f"The backbone's config.json asks for {name} = {json.dumps(value, default=str)}: supported is {supported}."
    )


def _bitsandbytes(section: Mapping[str, Any]) -> Quantisation:
    if not section.get("load_in_4bit", section.get("_load_in_4bit", False)):
        _refuse("load_in_8bit", True, "load_in_4bit; INT8 of compressed-tensors or torchao")
    if section.get("bnb_4bit_quant_type", "fp4") != "nf4":
        _refuse("bnb_4bit_quant_type", section.get("bnb_4bit_quant_type", "fp4"), "nf4")
    if section.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        _refuse("bnb_4bit_quant_storage", section["bnb_4bit_quant_storage"], "uint8")
    return Quantisation(
        "nf4",
        "bitsandbytes",
        double=bool(section.get("bnb_4bit_use_double_quant", False)),
        skipped=_strings(section, "llm_int8_skip_modules"),
    )


def _strings(section: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """The first list among some fields."""
    for name in names:
        found = section.get(name)
        if found is None:
            continue
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
            _refuse(name, found, "a list of module names")
        for pattern in found:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                _refuse(name, pattern, f"a module's name or a regular expression ({error})")
        return tuple(found)
    return ()


def _compressed_tensors(section: Mapping[str, Any]) -> Quantisation:
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        _refuse("config_groups", groups, "one group")
    (name, group), *_ = groups.items()
    kind = group.get("format") or section.get("format")
    if kind not in _FORMATS:
        _refuse("format", kind, ", ".join(_FORMATS))
    for other in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section.get(other):
            _refuse(other, section[other], "none")
    weights, field = group.get("weights") or {}, f"config_groups.{name}.weights"
    methods: dict[tuple[Any, Any], QuantMethod] = {("int", 8): "int8", ("float", 8): "fp8"}
    method = methods.get((weights.get("type", "int"), weights.get("num_bits")))
    if method is None:
        _refuse(field, dict(weights), "type int or float with num_bits 8")
    if kind == "pack-quantized" and method != "int8":
        _refuse("format", kind, "another one for FP8")
    if not weights.get("symmetric", True):
        _refuse(f"{field}.symmetric", False, "true")
    if weights.get("actorder"):
        _refuse(f"{field}.actorder", weights["actorder"], "none")
    return Quantisation(
        method,
        "compressed-tensors",
        block=_block(weights, field),
        skipped=_strings(section, "ignore"),
        targets=_strings(group, "targets"),
        experts=True,
        packed=kind == "pack-quantized",
    )


def _block(weights: Mapping[str, Any], field: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return (0 if strategy == "tensor" else 1), 0
    if strategy == "group" and isinstance(weights.get("group_size"), int):
        return 1, weights["group_size"]
    structure = weights.get("block_structure")
    if strategy == "block" and isinstance(structure, list | tuple) and len(structure) == 2:
        return int(structure[0]), int(structure[1])
    _refuse(
        f"{field}.strategy", strategy, "tensor, channel, group with group_size, block with block_structure"
    )


def _torchao(section: Mapping[str, Any]) -> Quantisation:
    quant = section.get("quant_type")
    own = quant.get("default") if isinstance(quant, Mapping) else None
    if not isinstance(own, Mapping) or own.get("_type") not in _TORCHAO:
        _refuse("quant_type", quant, f"{' or '.join(_TORCHAO)}")
    data = own.get("_data") or {}
    granularity = (data.get("granularity") or {}).get("_type", "PerRow")
    if own.get("_version") != 2 or granularity not in ("PerRow", "PerTensor") or data.get("group_size"):
        _refuse("quant_type", quant, f"{own['_type']} of version 2, by rows or tensors")
    if section.get("include_input_output_embeddings"):
        _refuse("include_input_output_embeddings", True, "false")
    return Quantisation(
        _TORCHAO[own["_type"]],
        "torchao",
        block=(1 if granularity == "PerRow" else 0, 0),
        skipped=_strings(section, "modules_to_not_convert"),
    )


def _fp8(section: Mapping[str, Any]) -> Quantisation:
    for name, known in (("scale_fmt", "float"), ("expert_dtype", "fp8"), ("fmt", "e4m3")):
        if section.get(name, known) != known:
            _refuse(name, section[name], known)
    if section.get("modules_to_convert"):
        _refuse("modules_to_convert", section["modules_to_convert"], "none")
    size = section.get("weight_block_size", (128, 128))
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(n, int) and n > 0 for n in size)
    ):
        _refuse("weight_block_size", size, "two numbers, such as [128, 128]")
    return Quantisation(
        "fp8",
        "fp8",
        block=(int(size[0]), int(size[1])),
        skipped=_strings(section, "modules_to_not_convert", "ignored_layers"),
        experts=True,
    )
