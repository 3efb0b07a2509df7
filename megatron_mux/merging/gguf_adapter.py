"""Exports LoRA and VeRA adapters as GGUF files, for llama.cpp.

llama.cpp adds `alpha / r * B A` to the product of a weight, with one `alpha` a file and the rank of each B. Whatever
else there is to a module's scale goes into its B. Rows of B follow the rows of the converted weight.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_mux.backbone.model_directory import open_checkpoint
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.base_ops import LATENT_OPS
from megatron_mux.errors import UserError
from megatron_mux.files import sync_directory
from megatron_mux.merging.kinds import check_fit, check_vera
from megatron_mux.merging.low_rank import LowRank, VeraMatrices, lora_terms
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.merging.weights import Changes

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "gemma3_text": "GEMMA3",
    "gpt2": "GPT2",
    "phi3": "PHI3",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
}
"""llama.cpp's architecture of each of our families that it knows."""

_INTERLEAVED = ("llama", "mistral", "mixtral")
"""Families whose query and key rows llama.cpp's converter reorders: it rotates neighbouring features of a head."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        architecture: llama.cpp's name of it.
        modules: Number of pairs of matrices.
        alpha: The one `alpha`.
        size: Bytes of the file.
        seconds: Time that it took.
    """

    architecture: str
    modules: int
    alpha: float
    size: int
    seconds: float


@dataclass(frozen=True)
class _Pair:
    """The matrices of one GGUF tensor: A, `[R, in]`, and B, `[out, R]`, with experts in front where there are any."""

    name: str
    a: Tensor
    b: Tensor


def export_gguf(
    backbone: str | Path, adapter: str | Path, output: str | Path, outtype: Literal["f32", "f16"] = "f32"
) -> Exported:
    """Write an adapter as a GGUF file.

    Args:
        backbone: Hugging Face directory of the model that the adapter belongs to.
        adapter: Directory in peft's format.
        output: The file to make.
        outtype: How values are stored.

    Raises:
        UserError: The adapter is none that llama.cpp can apply, or of another backbone; the file exists; or the package
            `gguf` is missing.
    """
    began = time.monotonic()
    adapter, output = Path(adapter), Path(output)
    try:
        import gguf
    except ImportError:
        raise UserError("The package gguf is missing: pip install gguf.") from None
    if output.exists():
        raise UserError(f"--output {output} exists already: choose a new file, or remove it first.")
    info, stored = read_backbone_info(backbone), StoredAdapter(adapter)
    if info.shape.family not in _ARCHITECTURES:
        raise UserError(
            f"Exports have no architecture for a {info.shape.family}: they have llama.cpp's for "
            f"{', '.join(_ARCHITECTURES)}."
        )
    naming = _Naming(gguf, info)
    alpha = float(stored.config.get("r" if stored.kind == "VERA" else "lora_alpha") or 1.0)
    dtype = torch.float32 if outtype == "f32" else torch.float16
    pairs = list(_pairs(stored, info, naming, alpha))
    partial = output.with_name(f".partial-{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(gguf, partial, naming.architecture, stored.name, alpha, pairs, dtype)
        os.replace(partial, output)
        sync_directory(output.absolute().parent)
    except OSError as error:
        raise UserError(f"--output {output}: could not write: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return Exported(naming.architecture, len(pairs), alpha, output.stat().st_size, time.monotonic() - began)


class _Naming:
    """GGUF names of a backbone's modules."""

    def __init__(self, gguf: ModuleType, info: BackboneInfo) -> None:
        arch = gguf.MODEL_ARCH[_ARCHITECTURES[info.shape.family]]
        self.gguf, self.info = gguf, info
        self.architecture: str = gguf.MODEL_ARCH_NAMES[arch]
        self._map = gguf.get_tensor_name_map(arch, info.shape.layers)
        # llama.cpp computes these without looking for adapters: it would leave them out and say nothing.
        self._latent = {module.path for module in info.shape.modules if module.op in LATENT_OPS}
        self._latent.add(info.shape.names.head)

    def module(self, path: str) -> str:
        """The name of a module's weight.

        Raises:
            UserError: llama.cpp has none that an adapter can be added to.
        """
        shape = self.info.shape
        if shape.tied and path in (shape.names.head, shape.names.embedding):
            raise UserError(
                f"{path}: the backbone's output layer is its embedding, which llama.cpp holds once: it cannot adapt "
                "one of the two. Merge the adapter instead (megatron-mux merge)."
            )
        found: str | None = self._map.get_name(path)
        if found is None or (shape.latent is not None and path in self._latent):
            raise UserError(
                f"{path} cannot be adapted in llama.cpp ({self.architecture}): merge the adapter instead "
                "(megatron-mux merge)."
            )
        return f"{found}.weight"

    def experts(self, path: str, parameter: str) -> dict[str, slice]:
        """The names of a layer's experts' weights, and which rows of B each has: gate and up are stored apart."""
        experts = self.info.shape.experts
        assert experts is not None
        layer = int(path.removesuffix(f".{experts.names.fused}").rpartition(".")[2])
        tensors, width = self.gguf.MODEL_TENSOR, experts.ffn
        rows = {tensors.FFN_GATE_EXP: slice(0, width), tensors.FFN_UP_EXP: slice(width, 2 * width)}
        if parameter == "down_proj":
            rows = {tensors.FFN_DOWN_EXP: slice(None)}
        return {
            f"{self.gguf.TENSOR_NAMES[tensor].format(bid=layer)}.weight": part
            for tensor, part in rows.items()
        }


def _pairs(adapter: StoredAdapter, info: BackboneInfo, naming: _Naming, alpha: float) -> Iterator[_Pair]:
    changes, used = Changes.of_backbone(info), set[str]()
    if adapter.kind == "LORA":
        for term in lora_terms(adapter, info.shape):
            check_fit(term, changes)
            if term.magnitude is not None:
                raise _unsupported(adapter, "DoRA")
            used |= {term.a, term.b}
            yield from _of_term(term, info, naming, alpha)
    elif adapter.kind == "VERA":
        matrices = VeraMatrices(adapter, info.shape)
        used = {key for key in matrices.KEYS if key in adapter.shapes}
        for path, size, keys in check_vera(adapter, matrices, changes):
            a, b = matrices.of(adapter, path, *size)
            used |= keys
            yield _Pair(naming.module(path), a, _reordered(b * (a.shape[0] / alpha), path, info))
    else:
        raise _unsupported(adapter, adapter.kind)
    for key in sorted(adapter.shapes.keys() - used):
        if not _is_of_backbone(adapter, key, info):
            raise _unsupported(adapter, key)


def _is_of_backbone(adapter: StoredAdapter, key: str, info: BackboneInfo) -> bool:
    """Whether a tensor is the backbone's own: peft stores an adapted embedding's weight beside its matrices."""
    name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
    if name not in info.stored:
        return False
    with open_checkpoint(info.path, info.shape) as checkpoint:
        size = checkpoint.tensors[info.stored[name]].shape
        if adapter.shapes[key] != size:
            return False
        weight = checkpoint.read(info.stored[name], slice(0, size[0]))
    return torch.equal(weight.to(torch.float32), adapter.read(key).to(torch.float32))


def _of_term(term: LowRank, info: BackboneInfo, naming: _Naming, alpha: float) -> Iterator[_Pair]:
    """The GGUF tensors of a product."""
    factor = term.scale * term.rank / alpha
    if term.experts:
        a, b = term.experts_matrices()
        for name, rows in naming.experts(term.path, term.parameter).items():
            yield _Pair(name, a, b[:, rows] * factor)
        return
    a, b = term.matrices()
    # llama.cpp looks rows of an embedding's A up by token.
    yield _Pair(
        naming.module(term.path), a.t() if term.embedding else a, _reordered(b * factor, term.path, info)
    )


def _reordered(b: Tensor, path: str, info: BackboneInfo) -> Tensor:
    """B with its rows in the order of llama.cpp's converted weight."""
    shape, module = info.shape, path.rpartition(".")[2]
    if shape.family not in _INTERLEAVED or module not in ("q_proj", "k_proj"):
        return b
    heads = shape.heads if module == "q_proj" else shape.kv_heads
    return b.view(heads, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)


def _unsupported(adapter: StoredAdapter, what: str) -> UserError:
    return UserError(
        f"{adapter.directory}: llama.cpp applies low-rank products only, not {what}: merge the adapter instead "
        "(megatron-mux merge), and convert the merged model."
    )


def _write(
    gguf: ModuleType,
    path: Path,
    architecture: str,
    name: str,
    alpha: float,
    pairs: list[_Pair],
    dtype: torch.dtype,
) -> None:
    writer: Any = gguf.GGUFWriter(path, architecture)
    kind = gguf.LlamaFileType.ALL_F32 if dtype == torch.float32 else gguf.LlamaFileType.MOSTLY_F16
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_file_type(kind)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for pair in pairs:
        for side, matrix in (("lora_a", pair.a), ("lora_b", pair.b)):
            values = matrix.to(dtype)
            if not bool(values.isfinite().all()):
                raise UserError(f"{pair.name}: values are too large for f16: use --outtype f32.")
            writer.add_tensor(f"{pair.name}.{side}", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())
