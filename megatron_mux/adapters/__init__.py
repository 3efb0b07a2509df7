"""PEFT methods and their attachment to the backbone: one file per method, `attach.AdapterSet` for all of them."""

from megatron_mux.adapters.adapter import KINDS
from megatron_mux.adapters.bottleneck import Bottleneck
from megatron_mux.adapters.diff_pruning import DiffPruning
from megatron_mux.adapters.ia3 import IA3
from megatron_mux.adapters.lora import Lora
from megatron_mux.adapters.prefix import PrefixTuning

__all__ = ["IA3", "KINDS", "Bottleneck", "DiffPruning", "Lora", "PrefixTuning"]
