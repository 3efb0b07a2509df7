"""Adapters on disk: peft reads ours and computes the same, we read peft's; what does not fit is refused in words."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_mux import runtime
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.peft_format import read_adapter, read_files
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import activate
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from tests.logits import all_logits
from tests.tiny_models import make
from tests.unit.adapters.toy import assemble, ia3, lora, noise, task

pytestmark = pytest.mark.versions

QVO, IA3 = ["q_proj", "v_proj", "o_proj"], ["k_proj", "v_proj", "down_proj"]
PEFT = {
    "lora": lora("t", target_modules=QVO),
    "rslora": lora("t", target_modules="all-linear", use_rslora=True, r=5),
    "regex": lora("t", target_modules=r".*layers\.[02]\.mlp\.(gate|down)_proj"),
    "dora": lora("t", target_modules="all-linear", use_dora=True, init_lora_weights="gaussian"),
    "fields": lora(
        "t",
        target_modules=QVO,
        layers_to_transform=[0, 1],
        layers_pattern="layers",
        exclude_modules=["1.self_attn.o_proj"],
        rank_pattern={"q_proj": 5},
        alpha_pattern={".*0.*v_proj": 7},
    ),
    "ia3": ia3("t", IA3, ["down_proj"]),
    "ia3-paths": ia3("t", ["mlp.down_proj", "k_proj"], r".*\.down_proj"),
    "ia3-none": ia3("t", ["o_proj", "up_proj"], []),
    "prefix": task("t", peft_type="PREFIX_TUNING", num_virtual_tokens=3),
    "vera": task("t", peft_type="VERA", r=6, target_modules=QVO),
    "loha": task("t", peft_type="LOHA", r=3, target_modules=QVO),
    "loha-fields": task(
        "t",
        peft_type="LOHA",
        target_modules=QVO,
        layers_to_transform=[0, 1],
        exclude_modules=["1.self_attn.o_proj"],
        rank_pattern={"q_proj": 5},
        alpha_pattern={".*0.*v_proj": 7},
    ),
    "vera-drawn": task("t", peft_type="VERA", r=6, save_projection=False, target_modules="all-linear"),
}
GPT2 = {
    "lora": lora("t", target_modules=["c_attn"]),
    "rslora": lora("t", target_modules="all-linear", use_rslora=True, r=5),
    "dora": lora("t", target_modules=["c_attn", "mlp.c_proj"], use_dora=True),
    "ia3": ia3("t", ["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "ia3-ff": ia3("t", ["c_attn", "c_proj"], ["c_attn"]),
    "prefix": PEFT["prefix"],
    "vera": task("t", peft_type="VERA", r=6, target_modules=["c_attn", "mlp.c_proj"], projection_prng_key=5),
}
CASES = [("llama", k, v) for k, v in PEFT.items()] + [("gpt2", k, v) for k, v in GPT2.items()]
IDS = [f"{model}-{kind}" for model, kind, _ in CASES]


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


@pytest.fixture(scope="module")
def backbones(
    parallel: Parallel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Backbone]]:
    where = tmp_path_factory.mktemp("models")
    paths = {name: make(where, name) for name in ("llama", "gpt2")}
    return {name: (path, Backbone.load(path, parallel)) for name, path in paths.items()}


def adapters_of(backbone: Backbone, parallel: Parallel) -> AdapterSet:
    """No adapters yet."""
    weights = backbone.module_weight
    return AdapterSet(Host(backbone.base_ops(), parallel, backbone.dtype, backbone.shape, weights=weights))


def export(directory: Path, adapters: AdapterSet, name: str) -> Path:
    """What a checkpoint holds of the adapter."""
    adapter = adapters.tasks[name]
    full = {}
    for p in [*adapter.parameters, *(p for p in adapter.fixed if adapter.tensors[p.key].stored)]:
        full[p.key] = torch.full(p.full_shape, float("nan"))
        assemble(p, full[p.key], p.value.detach())
    save_file(full, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(adapter.spec.config(adapter.host.shape)))
    return directory


def shaken(adapters: AdapterSet, spec: Any) -> None:
    """A new adapter in which nothing is zero."""
    for p in adapters.add(spec, 4).parameters:
        p.value.data.add_(0.3 * noise(p.key, *p.value.shape).float())


def logits(backbone: Backbone, tokens: Tensor, virtual: int) -> Tensor:
    batch = pack(
        [PackedSequence("t", 0, tokens, torch.ones(len(tokens), dtype=torch.bool), 1.0)],
        ("t",),
        {"t": 0},
        {"t": virtual},
        training=False,
    ).to()
    with torch.no_grad(), activate(batch):
        return all_logits(backbone, batch)


@pytest.mark.parametrize(("model", "kind", "spec"), CASES, ids=IDS)
def test_peft_loads_ours_and_agrees(
    model: str, kind: str, spec: Any, backbones: Any, parallel: Parallel, tmp_path: Path
) -> None:
    path, backbone = backbones[model]
    adapters = adapters_of(backbone, parallel)
    shaken(adapters, spec)
    export(tmp_path, adapters, "t")
    tokens = torch.randint(1, 90, (11,), generator=torch.Generator().manual_seed(1))
    ours = logits(backbone, tokens, spec.adapter.virtual_tokens)
    # Read back by us, it is the same adapter.
    again = read_adapter(tmp_path, spec.adapter, backbone.shape)
    adapters.remove("t")
    adapters.add(spec, 4, again)
    assert torch.equal(logits(backbone, tokens, spec.adapter.virtual_tokens), ours)
    adapters.remove("t")
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        bare = plain(tokens[None]).logits[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # keys that do not match are a warning in peft
            warnings.filterwarnings("ignore", "Specified to not (save|load) vera_A")
            theirs = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
        wanted = theirs(tokens[None], use_cache=False).logits[0]
    assert (wanted - bare).abs().max() > 0.05
    assert (ours - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize(("model", "kind", "spec"), CASES, ids=IDS)
def test_files_are_as_peft_writes_them(
    model: str, kind: str, spec: Any, backbones: Any, parallel: Parallel, tmp_path: Path
) -> None:
    path, backbone = backbones[model]
    adapters = adapters_of(backbone, parallel)
    shaken(adapters, spec)
    (tmp_path / "ours").mkdir()
    export(tmp_path / "ours", adapters, "t")
    adapters.remove("t")
    fields = spec.adapter.model_dump(exclude={"peft_type", "adapter_name_or_path"})
    if kind == "ia3-paths":
        fields["feedforward_modules"] = ["mlp.down_proj"]  # peft wants the very names
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[spec.adapter.peft_type](task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(
            str(tmp_path / "theirs")
        )
    ours, theirs = (
        json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    free = {"base_model_name_or_path", "peft_version", "target_modules", "feedforward_modules"}
    assert {k: v for k, v in ours.items() if k not in free} == {
        k: v for k, v in theirs.items() if k not in free
    }
    if isinstance(fields.get("target_modules"), list) and kind != "ia3-paths":
        assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])
    a, b = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert {k: (v.shape, v.dtype) for k, v in a.items()} == {k: (v.shape, v.dtype) for k, v in b.items()}
    # And we start from what peft wrote.
    started = adapters.add(spec, 4, read_adapter(tmp_path / "theirs", spec.adapter, backbone.shape))
    assert started.parameters
    adapters.remove("t")


def test_own_kinds_make_the_round_trip(backbones: Any, parallel: Parallel, tmp_path: Path) -> None:
    _, backbone = backbones["gpt2"]
    for spec in (
        task(
            "t",
            peft_type="BOTTLENECK",
            bottleneck_size=4,
            non_linearity="relu",
            scaling=1.0,
            target_modules=["c_proj"],
        ),
        task(
            "t",
            peft_type="DIFF_PRUNING",
            sparsity=0.9,
            l0_weight=0.0,
            target_modules=["c_attn", "mlp.c_proj"],
        ),
    ):
        adapters = adapters_of(backbone, parallel)
        shaken(adapters, spec)
        before = {p.key: p.value.detach().clone() for p in adapters.tasks["t"].parameters}
        export(tmp_path, adapters, "t")
        adapters.remove("t")
        again = adapters.add(spec, 4, read_adapter(tmp_path, spec.adapter, backbone.shape))
        assert all(torch.equal(p.value, before[p.key]) for p in again.parameters)
        adapters.remove("t")
        config, _ = read_files(tmp_path)
        assert config["target_modules"] == spec.adapter.target_modules


@pytest.fixture
def stored(backbones: Any, parallel: Parallel, tmp_path: Path) -> Path:
    _, backbone = backbones["llama"]
    adapters = adapters_of(backbone, parallel)
    shaken(adapters, PEFT["lora"])
    export(tmp_path, adapters, "t")
    adapters.remove("t")
    return tmp_path


def refusal(directory: Path, spec: Any, info: Any) -> str:
    with pytest.raises(UserError) as error:
        read_adapter(directory, spec.adapter, info.shape)
    assert all("\n" not in problem for problem in error.value.problems)
    return str(error.value)


def test_refusals_name_what_is_wrong(stored: Path, backbones: Any) -> None:
    info, good = backbones["llama"][1].info, PEFT["lora"]
    assert "is a LORA adapter, the task asks for IA3" in refusal(stored, PEFT["ia3"], info)
    assert "has r = 3, the task 4" in refusal(stored, lora("t", target_modules=QVO, r=4), info)
    assert "lora_alpha = 5, the task 6" in refusal(stored, lora("t", target_modules=QVO, lora_alpha=6), info)
    assert "which the task does not target" in refusal(stored, lora("t", target_modules=["q_proj"]), info)
    assert "k_proj.lora_A.weight and" in refusal(stored, lora("t", target_modules=["k_proj", *QVO]), info)
    assert "adapter_config.json" in refusal(stored.parent / "nowhere", good, info)
    (stored / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(stored, good, info)
    (stored / "adapter_config.json").write_text("[]")
    assert "JSON object" in refusal(stored, good, info)


def test_unreadable_tensors(stored: Path, backbones: Any) -> None:
    info, good = backbones["llama"][1].info, PEFT["lora"]
    weights = stored / "adapter_model.safetensors"
    tensors = load_file(weights)
    for content in (b"", b"\x08\0\0\0\0\0\0\0{}", weights.read_bytes()[:-100]):
        weights.write_bytes(content)
        assert "not a readable safetensors file" in refusal(stored, good, info)
    key = next(iter(tensors))
    save_file(tensors | {key: tensors[key][:, :-1].contiguous()}, weights)
    assert f"{key} has shape" in refusal(stored, good, info)
    save_file(tensors | {key: tensors[key].to(torch.int32)}, weights)
    assert "not numbers to train" in refusal(stored, good, info)
    weights.unlink()
    assert "no adapter_model.safetensors" in refusal(stored, good, info)


def test_adapter_of_another_backbone(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("other")
    wider = read_backbone_info(make(where, "llama", hidden_size=48))
    assert "where the task and the backbone need" in refusal(stored, PEFT["lora"], wider)
    deeper = read_backbone_info(make(where, "llama-tied", num_hidden_layers=5))
    assert "lacks" in refusal(stored, PEFT["lora"], deeper)


def test_nothing_is_attached_when_adding_fails(backbones: Any, parallel: Parallel) -> None:
    _, backbone = backbones["llama"]
    adapters = adapters_of(backbone, parallel)
    adapters.add(lora("t", target_modules=["q_proj"]), 4)
    bad = [
        (lora("t", target_modules=["q_proj"]), None),
        (lora("u", target_modules=["nothing"]), None),
        (
            task(
                "u",
                peft_type="BOTTLENECK",
                bottleneck_size=4,
                non_linearity="relu",
                scaling=1.0,
                target_modules=["q_proj"],
            ),
            None,
        ),
        (lora("u", target_modules=["q_proj"]), {"stray": torch.zeros(1)}),
    ]
    for spec, initial in bad:
        with pytest.raises(UserError):
            adapters.add(spec, 4, initial)
        assert list(adapters.tasks) == ["t"]
    adapters.remove("t")
    assert not any("forward" in info.module.__dict__ for info in backbone.base_ops())
