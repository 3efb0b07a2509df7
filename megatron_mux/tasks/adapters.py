"""The `adapter` section: one model per PEFT method, in the fields and spellings of peft's config classes.

What peft knows and we do not do is listed here, so that it is refused by name and never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_mux.tasks.section import (
    LARGEST_SIZE,
    FilePath,
    Modules,
    Number,
    Refused,
    Section,
    Targets,
    TidyNumber,
    problem,
)

_NOT_YET = "is a peft field that megatron-mux does not do yet: leave it out"


def _not_yet(*names: str, neutral: tuple[Any, ...] = (None, False)) -> dict[str, Refused]:
    return {name: Refused(_NOT_YET, neutral) for name in names}


def _bookkeeping(*names: str) -> dict[str, Refused]:
    return {name: Refused("", always=True) for name in names}


_COMMON: Mapping[str, Refused] = {
    **_bookkeeping("peft_version", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    **_not_yet("modules_to_save", neutral=(None, [])),
    "task_type": Refused("only CAUSAL_LM is done: leave it out", (None, "CAUSAL_LM")),
}

_TUNER: Mapping[str, Refused] = {
    **_COMMON,
    **_not_yet("exclude_modules", neutral=(None, [])),
    # How the backbone stores its weights: peft corrects a wrong value, we know it from the backbone.
    **_bookkeeping("fan_in_fan_out"),
}


class AdapterBase(Section):
    """Fields that every PEFT method has."""

    adapter_name_or_path: FilePath | None = None
    """Directory of a PEFT adapter to start from (`adapter_config.json`, `adapter_model.safetensors`); its fields are
    taken over, those given in the task must agree. None starts a fresh adapter."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset()
    """Fields that may differ from those of the adapter that training starts from."""

    from_weights: ClassVar[frozenset[str]] = frozenset()
    """Fields of a stored config that its weights or the backbone settle: not taken over."""


class LoraSpec(AdapterBase):
    """LoRA (`peft.LoraConfig`)."""

    peft_type: Literal["LORA"]
    """The method."""
    r: int = Field(default=8, ge=1, le=LARGEST_SIZE)
    """Rank."""
    lora_alpha: TidyNumber = Field(default=8, gt=0)
    """The update is scaled by `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    use_rslora: bool = False
    """Scale by the square root of the rank (rank-stabilised LoRA)."""
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset({"lora_dropout"})
    from_weights: ClassVar[frozenset[str]] = frozenset({"megatron_core", "qalora_group_size"})
    refused: ClassVar[Mapping[str, Refused]] = {
        **_TUNER,
        **_not_yet(
            "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying", "layers_to_transform", "layer_replication",
            "megatron_config", "trainable_token_indices", "eva_config", "corda_config", "lora_ga_config",
            "velora_config", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config",
            "kasa_config",
        ),
        **_not_yet("rank_pattern", "alpha_pattern", "loftq_config", neutral=(None, {})),
        **_not_yet("layers_pattern", "target_parameters", neutral=(None, [])),
        **_not_yet("runtime_config", neutral=(None, {}, {"ephemeral_gpu_offload": False})),
        **_bookkeeping("megatron_core", "qalora_group_size"),
        "bias": Refused("only none is done: the backbone is frozen, its biases too", ("none",)),
        "init_lora_weights": Refused("only true (peft's default) is done yet: leave it out", (True,)),
    }  # fmt: skip


class IA3Spec(AdapterBase):
    """IA3 (`peft.IA3Config`): learned scales of outputs, or of inputs for feed-forward modules."""

    peft_type: Literal["IA3"]
    """The method."""
    target_modules: Targets = None
    """Modules that get a scale; None: the ones peft would choose for the backbone's family."""
    feedforward_modules: Modules = None
    """Those of `target_modules` whose input is scaled rather than their output; may be empty; None: peft's choice."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **_TUNER,
        "init_ia3_weights": Refused("only true (peft's default) is done: leave it out", (True,)),
    }

    @model_validator(mode="after")
    def _feedforward_modules_are_targets(self) -> IA3Spec:
        if isinstance(self.target_modules, list) and isinstance(self.feedforward_modules, list):
            others = [name for name in self.feedforward_modules if name not in self.target_modules]
            if others:
                raise problem(f"feedforward_modules must be among target_modules: {', '.join(others)} is not")
        return self


class PrefixTuningSpec(AdapterBase):
    """Prefix tuning (`peft.PrefixTuningConfig`): learned keys and values in front of every sequence."""

    peft_type: Literal["PREFIX_TUNING"]
    """The method."""
    num_virtual_tokens: int = Field(ge=1, le=LARGEST_SIZE)
    """Length of the prefix."""

    from_weights: ClassVar[frozenset[str]] = frozenset(
        {
            "token_dim",
            "num_transformer_submodules",
            "num_attention_heads",
            "num_layers",
            "encoder_hidden_size",
        }
    )
    refused: ClassVar[Mapping[str, Refused]] = {
        **_COMMON,
        **_not_yet("prefix_projection"),
        **_not_yet("init_weights", neutral=(None,)),
        **{
            name: Refused("follows from the backbone: leave it out", (None,))
            for name in ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
        },
        "encoder_hidden_size": Refused(
            "belongs to prefix_projection, which is not done: leave it out", (None,)
        ),
    }


class BottleneckSpec(AdapterBase):
    """Bottleneck adapter (Houlsby et al.): `y + scaling * up(non_linearity(down(y)))` after a module."""

    peft_type: Literal["BOTTLENECK"]
    """The method."""
    bottleneck_size: int = Field(default=64, ge=1, le=LARGEST_SIZE)
    """Width between the two projections."""
    non_linearity: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    """What stands between the two projections."""
    scaling: Number = 1.0
    """Factor of the adapter's output."""
    target_modules: Targets = None
    """Modules that get an adapter: ends of an attention or MLP sublayer; None: all of these."""

    refused: ClassVar[Mapping[str, Refused]] = _COMMON


class DiffPruningSpec(AdapterBase):
    """Diff pruning (Guo et al.): a sparse difference to a module's weight, its mask learned with it."""

    peft_type: Literal["DIFF_PRUNING"]
    """The method."""
    sparsity: Number = Field(default=0.995, ge=0, lt=1)
    """Share of the difference that is zero at the end."""
    l0_weight: Number = Field(default=1.25e-7, ge=0)
    """Weight of the expected number of non-zeros in the objective."""
    target_modules: Targets = None
    """Modules that get a difference; None: the ones peft would choose for LoRA."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset({"l0_weight", "sparsity"})
    refused: ClassVar[Mapping[str, Refused]] = _COMMON


AdapterSpec = Annotated[
    LoraSpec | IA3Spec | PrefixTuningSpec | BottleneckSpec | DiffPruningSpec, Field(discriminator="peft_type")
]
"""Any `adapter` section; `peft_type` says which."""

ADAPTERS: Mapping[str, type[AdapterBase]] = {
    "LORA": LoraSpec,
    "IA3": IA3Spec,
    "PREFIX_TUNING": PrefixTuningSpec,
    "BOTTLENECK": BottleneckSpec,
    "DIFF_PRUNING": DiffPruningSpec,
}
"""`peft_type` to its model."""

_PEFT_ONLY = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING ADALORA ADAMSS BOFT ADAPTION_PROMPT BEFT LILY LOHA LOKR OFT POLY "
    "LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS RANDLORA ROAD TRAINABLE_TOKENS HIRA "
    "SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT SHADOW SUPERTUNING DEFT"
)
PEFT_ONLY = frozenset(_PEFT_ONLY.split())
"""Methods of peft that we do not do."""
