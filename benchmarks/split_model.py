"""The random backbone, records, task and certificates of `split.py`, and what a task takes on the server."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.split.protocol.agreement import Proposal
    from megatron_mux.split.server.session_memory import Memory

SEQUENCES = 2
LENGTH = 48
ROWS = SEQUENCES * LENGTH
VOCAB = 1024

SERVER_NAME = "server"
"""Name in the server's certificate; clients reach it at several addresses."""

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}


def write_model(directory: Path, hidden: int = 384, layers: int = 5) -> None:
    """Write a random Llama with a tokenizer of one token a word, and records that fill `LENGTH` tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    draw = random.Random(0)
    with (directory / "records.jsonl").open("w") as file:
        for _ in range(64):
            file.write(json.dumps({"text": " ".join(draw.choices(words[3:], k=LENGTH + 8))}) + "\n")


def write_certificates(directory: Path, clients: int) -> None:
    """Write a CA and the certificates of the server and of clients `client-0`, `client-1`, ..."""
    from megatron_mux.split.certificates import write_certificates as write

    directory.mkdir()
    write(directory, [SERVER_NAME], [f"client-{i}" for i in range(clients)], days=2, replace=False)


def task(model: Path) -> dict[str, Any]:
    """The task of every client: it runs until its process is killed."""
    return {
        "name": "task",
        "adapter": ADAPTER,
        "data": {"path": str(model / "records.jsonl"), "max_length": LENGTH},
        "training": {
            "per_device_train_batch_size": SEQUENCES,
            "max_steps": 100_000,
            "learning_rate": 1e-4,
        },
    }


def proposal(fingerprint: str, rows: int, longest: int, name: str = "task") -> Proposal:
    """What a client asks for whose requests have so many rows (LoRA r=8 on q and v, cut 1/0)."""
    from megatron_mux.split.protocol.agreement import Proposal
    from megatron_mux.tasks import TrainingSpec

    return Proposal(
        task=name,
        fingerprint=fingerprint,
        cut_front=1,
        cut_back=0,
        wire="f32",
        adapter=ADAPTER,
        training=TrainingSpec(max_steps=100_000, learning_rate=1e-6),
        total_steps=100_000,
        train_rows=rows,
        rows=rows,
        sequences=-(-rows // longest),
        longest=longest,
        run="0" * 16,
        incarnation="0" * 16,
    )


@dataclass(frozen=True)
class Sizes:
    """What the server needs, in bytes.

    Attributes:
        weights: Of the body, M.
        memory: Of a task and its requests.
    """

    weights: int
    memory: Memory

    @property
    def whole_task(self) -> int:
        """A task with a body of its own: M + A + O + I."""
        return self.weights + self.memory.lasting + self.memory.backward


def measure_sizes(model: Path) -> Sizes:
    """What a task of the benchmark takes, as the server predicts it."""
    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_shape
    from megatron_mux.split.server.body import Body
    from megatron_mux.split.server.session_prediction import BodyPlace, predict, prediction_worker

    parallel, layers = runtime.initialize(device="cpu"), read_shape(model).layers
    body = Body(Backbone.load(model, parallel, split=(1, layers - 1, 0), stage=1, ends=False), parallel)
    place = BodyPlace.of(body, range(1, layers))
    memory = prediction_worker().submit(predict, place, proposal("", ROWS, LENGTH)).result()
    return Sizes(body.shared_bytes, memory)


def memory_limit(sizes: Sizes, clients: int) -> tuple[int, str]:
    """The `--memory-limit` of all policies, and its reason.

    Raises:
        ValueError: So many clients' adapters and one request do not fit.
    """
    limit = 3 * sizes.whole_task // 2
    mib, memory = 1 << 20, sizes.memory
    left = limit - sizes.weights - clients * (memory.lasting + memory.hidden)
    if left < memory.backward + memory.forward:
        raise ValueError(
            f"{clients} clients' adapters leave {left / mib:.1f} MiB: less than one request needs"
        )
    reason = (
        f"{limit / mib:.1f} MiB: halfway between one whole task and two. A task takes "
        f"{sizes.whole_task / mib:.1f} MiB: weights {sizes.weights / mib:.1f}, adapter and optimizer "
        f"{memory.lasting / mib:.2f}, a backward pass {memory.backward / mib:.2f}. With shared weights, "
        f"{(limit - sizes.weights) / mib:.1f} MiB are left for adapters and requests of all clients: beside {clients} "
        f"adapters, {left / memory.backward:.1f} backward passes."
    )
    return limit, reason
