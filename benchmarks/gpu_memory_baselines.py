"""Estimates of LLMem, DNNMem and Megatron's theoretical report, with which `gpu_memory.py` compares ours."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def baseline_estimates(case: Any) -> dict[str, int]:
    """Estimate the peak of full fine-tuning with each baseline that supports the case, in bytes, by its name."""
    from benchmarks.papers.decision import layouts
    from benchmarks.papers.dnnmem import DNNMem
    from benchmarks.papers.llmem import LLMem
    from megatron_mux.errors import UserError

    if case.adapter is not None:
        return {}
    skeleton = skeleton_of(case.config)
    estimates: dict[str, Callable[[], float]] = {
        "LLMem": lambda: sum(
            LLMem(skeleton.tensors, case.length).breakdown(layouts(1)[0], case.batch).values()
        ),
        "DNNMem": lambda: sum(DNNMem(skeleton, case.length).breakdown(case.batch).values()),
        "Megatron's report": lambda: megatron_report(case, skeleton),
    }
    found = {}
    for name, estimate in estimates.items():
        try:
            found[name] = int(estimate())
        except (UserError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def skeleton_of(config: Mapping[str, Any]) -> Any:
    """Read a model's tensors from the fields of its config.json."""
    from megatron_mux.memory.tensors import Skeleton

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        skeleton = Skeleton(path)
        _ = skeleton.tensors  # read while the file exists
        return skeleton


def megatron_report(case: Any, skeleton: Any) -> float:
    """Estimate the bytes with `megatron.training.theoretical_memory_usage`, which Megatron-Core 0.19 has.

    Raises:
        ImportError: Megatron-Core is older.
    """
    from megatron.training import theoretical_memory_usage as theory

    from megatron_mux.memory.forms.skeleton import read_architecture

    a = read_architecture(skeleton)
    gated, rms_norm = a.inner > a.ffn, any("RMSNorm" in name for name in skeleton.tensors.kinds)
    arguments = argparse.Namespace(
        add_bias_linear=not rms_norm,
        data_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        ffn_hidden_size=a.ffn,
        group_query_attention=a.kv_heads != a.heads,
        hidden_size=a.hidden,
        kv_channels=a.head_dim,
        micro_batch_size=case.batch,
        moe_latent_size=None,
        moe_layer_freq=1,
        mtp_num_layers=None,
        multi_latent_attention=False,
        normalization="RMSNorm" if rms_norm else "LayerNorm",
        num_attention_heads=a.heads,
        num_experts=None,
        num_layers=len(a.layers),
        num_query_groups=a.kv_heads,
        padded_vocab_size=a.vocabulary,
        pipeline_model_parallel_size=1,
        recompute_granularity="full" if case.recompute else None,
        seq_length=case.length,
        sequence_parallel=False,
        swiglu=gated,
        tensor_model_parallel_size=1,
        untie_embeddings_and_output_weights=not a.tied,
        use_distributed_optimizer=False,
        virtual_pipeline_model_parallel_size=None,
        world_size=1,
        moe_shared_expert_intermediate_size=None,
        moe_ffn_hidden_size=None,
        moe_router_topk=1,
        hybrid_layer_pattern=None,
        is_hybrid_model=False,
    )
    weights = theory.compute_weight_and_optimizer_memory(arguments)
    return float(weights + theory.compute_activation_memory_without_sp(arguments, 1))
