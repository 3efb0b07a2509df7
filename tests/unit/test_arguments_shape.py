"""Flags that say again what the backbone is, as scripts of Megatron do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Routing
from tests.unit.parsed import parse

pytestmark = pytest.mark.usefixtures("place")

ROPE = SimpleNamespace(rope_theta=500.0, rope_type="default", factor=1.0, partial_rotary_factor=1.0)
SHAPE = SimpleNamespace(
    layers=4, hidden=32, ffn=56, heads=4, kv_heads=2, head_dim=8, max_positions=128, vocab=97, norm="RMSNorm",
    norm_eps=1e-5, ropes=(ROPE,), gated=True, activation="silu", qk_norm=False, tied=True, norm_offset=0.0,
    experts=None, latent=None,
    biases={"linear_qkv": True, "linear_proj": False, "linear_fc1": False, "linear_fc2": False},
)  # fmt: skip


def test_shape_flags_that_agree() -> None:
    flags = (
        "--num-layers 4 --hidden-size 32 --ffn-hidden-size 56 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --kv-channels 8 --max-position-embeddings 128 --vocab-size 97 --normalization RMSNorm "
        "--norm-epsilon 1e-5 --position-embedding-type rope --rotary-base 500 --swiglu "
        "--disable-bias-linear --add-qkv-bias"
    )
    arguments = parse(*flags.split())
    arguments.check_shape(cast(Any, SHAPE))
    more = "--rotary-percent 1.0 --use-rotary-position-embeddings --no-position-embedding"
    parse(*more.split()).check_shape(cast(Any, SHAPE))
    routing = Routing(top_k=2, score="sigmoid", scale=2.5, groups=4, top_groups=2, bias=True)
    experts = SimpleNamespace(count=8, ffn=16, shared_ffn=24, routing=routing)
    latent = SimpleNamespace(query_rank=5, rank=6, plain=7, rotated=8, value=9)
    rope = SimpleNamespace(rope_theta=5e5, rope_type="llama3", factor=8.0, partial_rotary_factor=1.0)
    of_experts = SimpleNamespace(**{**vars(SHAPE), "experts": experts, "latent": latent, "ropes": (rope,)})
    flags = (
        "--num-experts 8 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 24 --moe-router-topk 2 "
        "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-enable-expert-bias --multi-latent-attention --q-lora-rank 5 "
        "--kv-lora-rank 6 --qk-head-dim 7 --qk-pos-emb-head-dim 8 --v-head-dim 9 --use-rope-scaling "
        "--rope-scaling-factor 8"
    )
    arguments = parse(*flags.split())
    arguments.check_shape(cast(Any, of_experts))
    with pytest.raises(UserError) as caught:
        arguments.check_shape(cast(Any, SHAPE))
    assert len(caught.value.problems) == len(arguments.shape) == 17
    assert caught.value.problems[0] == "--use-rope-scaling: contradicts --backbone model: remove it"


def test_expert_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().expert_managers == 0
    assert parse("--mux-expert-managers", "3").expert_managers == 3
    for world, managers in (("5", 4), ("1", 1)):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert parse("--mux-expert-managers", "auto").expert_managers == managers
    assert parse("--mux-expert-managers", "2", "--mux-expert-capacity", "4,8").mux_expert_capacity == (4, 8)


def test_shape_flags_that_contradict() -> None:
    arguments = parse(
        "--num-layers", "0", "--qk-layernorm", "--untie-embeddings-and-output-weights", "--swiglu"
    )
    with pytest.raises(UserError) as caught:
        arguments.check_shape(cast(Any, SHAPE))
    assert caught.value.problems == [
        "--num-layers 0: contradicts --backbone model, which has 4: remove it",
        "--qk-layernorm: contradicts --backbone model: remove it",
        "--untie-embeddings-and-output-weights: contradicts --backbone model: remove it",
    ]
