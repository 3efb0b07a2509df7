"""Checkpoints that Megatron itself saved on four ranks, read as backbones at 1 x 1 and 2 x 2: Megatron's own logits.

Megatron-Core 0.19 saves the first with `save_checkpoint` of `megatron.training`; where that is missing (0.16), and for
the others, `dist_checkpointing` saves. Transformer Engine is not installed: its `_extra_state` is emulated as its
modules write it, and the names that its spec gives norms are those that Megatron's local spec saves too.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing.dummy
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.megatron_on_cpu import FLAGS
from megatron_mux.merging.convert import convert
from megatron_mux.runtime import Parallel
from tests.distributed.small_gpt import on_cpu
from tests.distributed.test_logits import batch_of, sequences
from tests.logits import all_logits
from tests.tiny_models import words

pytestmark = pytest.mark.versions

HAS_LOOP = importlib.util.find_spec("megatron.training") is not None
LAYERS, HIDDEN, ROWS = 4, 32, 104
COMMON = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = {
    **COMMON,
    "ffn_hidden_size": 56,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 1000,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {**COMMON, "ffn_hidden_size": 48, "bias_gelu_fusion": False, "vocab_size": 97},
    "qwen3_moe": {
        **LLAMA,
        "qk_layernorm": True,
        "kv_channels": 12,
        "num_experts": 4,
        "moe_ffn_hidden_size": 20,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1, 1],
    },
}


class Division(NamedTuple):
    """How Megatron divides a model among four ranks, two of them stages.

    Attributes:
        model: Of `MODELS`.
        tensor: Ranks that share a layer.
        expert: Ranks that share the experts.
        virtual: Pieces of a stage.
    """

    model: str
    tensor: int = 2
    expert: int = 1
    virtual: int = 1


DIVISIONS = {name: Division(name) for name in MODELS} | {
    "llama, virtual pipelines": Division("llama", virtual=2),
    "qwen3_moe, expert parallel": Division("qwen3_moe", tensor=1, expert=2),
}
SAVED_BY_LOOP = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--ffn-hidden-size 56 --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --rotary-base 1000 --untie-embeddings-and-output-weights "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 --lr 1e-3 --train-iters 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {ROWS} --ckpt-format torch_dist --save-interval 1 --no-save-optim "
    "--no-save-rng"
).split()

ON_CPU: dict[str, Callable[..., Any]] = {
    "get_device_properties": lambda device=None: SimpleNamespace(major=10),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "current_device": lambda: torch.device("cpu"),
    "device_count": lambda: 1,
}


def build(division: Division, parallel: Parallel) -> list[Any]:
    """The pieces of this rank of Megatron's GPT, with random weights, norms and biases too."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    arguments = MODELS[division.model]
    get, gated = arguments.get, bool(arguments.get("swiglu"))
    config = TransformerConfig(
        **{name: arguments[name] for name in ("num_layers", "hidden_size", "num_attention_heads")},
        ffn_hidden_size=arguments["ffn_hidden_size"],
        num_query_groups=get("num_query_groups", 4),
        kv_channels=get("kv_channels"),
        normalization=get("normalization", "LayerNorm"),
        qk_layernorm=get("qk_layernorm", False),
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=get("add_bias_linear", True),
        num_moe_experts=get("num_experts"),
        moe_ffn_hidden_size=get("moe_ffn_hidden_size"),
        moe_router_topk=get("moe_router_topk", 2),
        moe_layer_freq=get("moe_layer_freq", 1),
        moe_token_dispatcher_type="allgather",
        tensor_model_parallel_size=division.tensor,
        expert_model_parallel_size=division.expert,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=division.virtual if division.virtual > 1 else None,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(10 + parallel.pp_rank)
    pieces = []
    for piece in range(division.virtual):
        virtual = piece if division.virtual > 1 else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=virtual
        )
        model = GPTModel(
            config,
            spec,
            ROWS,
            64,
            pre_process=parallel.is_first_stage and piece == 0,
            post_process=parallel.is_last_stage and piece == division.virtual - 1,
            parallel_output=False,
            share_embeddings_and_output_weights=not get("untie_embeddings_and_output_weights", False),
            position_embedding_type=get("position_embedding_type", "learned_absolute"),
            rotary_base=get("rotary_base", 10000),
            vp_stage=virtual,
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "linear" not in name:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
            elif parameter.dim() == 1:
                parameter.data += 0.1 * (1 + parallel.tp_rank * ("fc1" in name or "qkv" in name))
            elif ".experts." in name and division.expert > 1:  # every rank draws the same ones
                parameter.data *= 1 + 0.3 * parallel.dp_rank
        pieces.append(model.double().eval())  # or rounding alone would be as large as the tolerance
    return pieces


@torch.no_grad()
def megatrons_logits(pieces: list[Any], parallel: Parallel, vocabulary: int) -> Tensor | None:
    """Logits of the sequences of `batch_of`, one after the other, on the last stage."""
    found = []
    for tokens in sequences(vocabulary):
        for number, model in enumerate(pieces):
            if not (parallel.is_first_stage and number == 0):
                hidden = torch.empty(len(tokens), 1, HIDDEN, dtype=torch.float64)
                dist.recv(hidden, group=parallel.pp_group, group_src=1 - parallel.pp_rank)
                model.set_input_tensor(hidden)
            output = model(tokens[None], torch.arange(len(tokens))[None], None)
            if parallel.is_last_stage and number == len(pieces) - 1:
                found.append(output[0])
            else:
                dist.send(output, group=parallel.pp_group, group_dst=1 - parallel.pp_rank)
    return torch.cat(found) if found else None


def sharded_state(pieces: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """As Megatron's own `save_checkpoint` names the pieces."""
    if len(pieces) == 1:
        return {"model": pieces[0].sharded_state_dict(metadata=metadata)}
    return {f"model{i}": piece.sharded_state_dict(metadata=metadata) for i, piece in enumerate(pieces)}


def save(path: Path, pieces: list[Any], arguments: dict[str, Any], apart: bool) -> None:
    """Save as a user of `dist_checkpointing` does; `apart`: layer by layer, norms by the names of the modules."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if apart:
        for layer in (layer for model in pieces for layer in model.decoder.layers):
            layer.submodules_config.sharded_state_dict_keys_map = {}
    state = sharded_state(pieces, {"non_homogeneous_layers": apart})
    extra = [value for each in state.values() for key, value in each.items() if key.endswith("_extra_state")]
    assert extra  # empty without Transformer Engine, which keeps scales of fp8 there
    for each in extra:
        assert isinstance(each, ShardedObject)
        each.data = io.BytesIO(b"scales of fp8")
    state |= {"args": Namespace(**arguments), "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(path))


def save_by_loop(path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_checkpoint` of Megatron's training loop, its arguments from its own parser."""
    from megatron.core import tensor_parallel
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args, validate_args

    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["pretrain_gpt.py", *FLAGS, *SAVED_BY_LOOP, "--save", str(path)])
        for name, value in ON_CPU.items():
            patched.setattr(torch.cuda, name, value)
        tracker = SimpleNamespace(get_states=dict)
        patched.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda *_, **__: tracker)
        arguments = parse_args()
        validate_args(arguments)
        arguments.padded_vocab_size = ROWS
        patched.setattr(global_vars, "_GLOBAL_ARGS", arguments)
        checkpointing.save_checkpoint(7, [model], None, None, 0)


@pytest.fixture(autouse=True)
def _written_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core 0.19 writes in forks, of a process with gloo's threads here: a lock that one of them holds then
    stays held in the fork, and the save hangs (seen once in CI). Threads write the same files, as in 0.16."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch import multiprocessing as mp

    def get_context(method: str | None = None) -> Any:
        return multiprocessing.dummy if method == "fork" else mp.get_context(method)

    monkeypatch.setattr(filesystem_async, "mp", SimpleNamespace(get_context=get_context, Queue=mp.Queue))


@pytest.mark.parametrize("name", list(DIVISIONS))
def test_megatrons_logits(
    name: str,
    joined: Callable[..., Parallel],
    shared_dir: Path,
    stages: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    division = DIVISIONS[name]
    joined_as_saved = partial(joined, division.tensor, 2, expert=division.expert)
    parallel = joined_as_saved()
    arguments, path = MODELS[division.model], shared_dir / f"megatron-{name}"
    by_loop = HAS_LOOP and name == "llama"
    from megatron.core.transformer.moe import moe_utils

    # Layers with experts make a stream, and look for Transformer Engine's product without which it has no name in 0.16.
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    with on_cpu():
        pieces = build(division, parallel)
        expected = megatrons_logits(pieces, parallel, arguments.get("vocab_size", ROWS))
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        if by_loop:
            save_by_loop(path, pieces[0], monkeypatch)
        else:
            save(path, pieces, arguments, apart=division.model != "llama")
    dist.barrier()
    saved = path / "iter_0000007" if by_loop else path
    assert (saved / ".metadata").is_file()
    info = read_backbone_info(path)
    assert info.shape.family == division.model
    assert info.fingerprint == read_backbone_info(saved).fingerprint

    divided = [] if info.shape.experts else [(2, 2)]  # which need sequence parallelism
    for split in ((1, 1), *divided):
        parallel = joined(*split)
        backbone = Backbone.load(path, parallel, torch.float64)
        batch = batch_of(backbone, parallel)
        with torch.no_grad():
            hidden = stages(backbone, batch).forward()
        if parallel.is_last_stage and expected is not None:
            found = all_logits(backbone, batch, hidden)
            wanted = expected[:, : info.shape.vocab]
            assert wanted.std() > 0.02
            assert (found[: wanted.shape[0]] - wanted).abs().max() <= 1e-6

    parallel = joined_as_saved()
    if dist.get_rank() == 0:
        tokenizer = words(shared_dir / f"tokenizer-{name}")
        for source, output in ((path, "hugging-face"), (shared_dir / f"hugging-face-{name}", "back")):
            convert(source, shared_dir / f"{output}-{name}", tokenizer, 1 << 30, lambda *_: None)
    dist.barrier()
    with on_cpu():
        megatron_reads(
            shared_dir / f"back-{name}" / "release",
            pieces,
            build(division, parallel),
            info.shape.vocab,
            parallel.tp_rank,
        )


def megatron_reads(path: Path, was: list[Any], now: list[Any], vocabulary: int, tensor_rank: int) -> None:
    """Megatron loads what was converted there and back, and every value is what it was, to the bit."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in (parameter for piece in now for parameter in piece.parameters()):
            parameter.fill_(9.0)
    # Without the extra states, in which Transformer Engine keeps scales of fp8.
    state = dist_checkpointing.load(sharded_state(now, {}), str(path), strict="log_all")
    for old, new, values in zip(
        was, now, (value for key, value in state.items() if "model" in key), strict=True
    ):
        left = new.load_state_dict(values, strict=False)
        assert not [
            name for name in (*left.missing_keys, *left.unexpected_keys) if "_extra_state" not in name
        ]
        for (name, before), after in zip(old.named_parameters(), new.parameters(), strict=True):
            kept = before.shape[0]
            if "word_embeddings" in name or "output_layer" in name:
                kept = min(kept, vocabulary - tensor_rank * kept)  # padding is cut
            assert torch.equal(before[:kept], after[:kept]), name
