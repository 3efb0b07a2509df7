"""The quickstart's movie reviews, learnt by a backbone that is cut in two places: for `split_privacy.py`.

One process computes all layers. Hooks stand at the cuts: they replace what would leave a client by what may.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH = 16
WARM_UP_STEPS = 4
LEARNING_RATE = 2e-3
BEFORE, BEHIND = 2, 4
"""Tokens of the prompt before and behind the review."""


@dataclass(frozen=True)
class Record:
    """A review.

    Attributes:
        tokens: `[T]` prompt, label and end of sequence.
        prompt: Tokens of the prompt.
    """

    tokens: Tensor
    prompt: int

    @property
    def review(self) -> slice:
        """Where the review itself is."""
        return slice(BEFORE, self.prompt - BEHIND)


def read_reviews(tokenizer: Any, path: Path, longest: int) -> list[Record]:
    """The records of a file that have at most `longest` tokens."""
    records = []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        prompt = tokenizer(found["prompt"])["input_ids"]
        tokens = [*prompt, *tokenizer(found["completion"])["input_ids"], tokenizer.eos_token_id]
        if len(tokens) <= longest:
            records.append(Record(torch.tensor(tokens), len(prompt)))
    return records


def read_public(tokenizer: Any, directory: Path, count: int) -> list[Tensor]:
    """About `count` tokens of Jane Austen's novels and as many of WordNet's glosses, in texts of up to 128 tokens."""
    texts = []
    for name in ("austen", "glosses"):
        left = count
        for line in (directory / f"{name}.jsonl").read_text().splitlines():
            found = json.loads(line)
            text = found.get("text") or f"{found['input']}: {found['output']}"
            texts.append(torch.tensor(tokenizer(text)["input_ids"][:128]))
            left -= len(texts[-1])
            if left <= 0:
                break
    return texts


class SplitModel:
    """A backbone with LoRA whose first `cut` layers, final norm and output layer are a client's.

    Args:
        backbone: Its directory.
        cut: Layers before the front cut.
        adapted: Layers with LoRA.
        noise: What protects the rows that leave the client; None: they leave as they are.

    Attributes:
        sent: `[T, H]` hidden states that left the client last.
        last: `[T, H]` hidden states that came back.
        returned: `[T, H]` their gradients, which left the client.
    """

    def __init__(self, backbone: Path, cut: int, adapted: Sequence[int], noise: Any) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
        lora = LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], layers_to_transform=list(adapted)
        )
        get_peft_model(self.model, lora)  # in place
        self.noise = noise
        self.sent = self.last = self.returned = torch.empty(0)
        self._place = (0, 0)
        self._mask = torch.empty(0)
        layers = self.model.model.layers
        self._hooks = [
            layers[cut - 1].register_forward_hook(self._leave),
            layers[-1].register_forward_hook(self._come_back),
        ]

    def join(self) -> torch.nn.Module:
        """End the cut; returns the whole model."""
        for hook in self._hooks:
            hook.remove()
        return self.model

    def train(self, records: Sequence[Record], steps: int) -> None:
        """Train on so many batches of the records, in order."""
        from transformers import get_cosine_schedule_with_warmup

        parameters = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, WARM_UP_STEPS, steps)
        for step in range(steps):
            self.loss(records[step * BATCH : (step + 1) * BATCH], step).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def loss(self, records: Sequence[Record], step: int) -> Tensor:
        """The mean over all labelled tokens: label and end of sequence."""
        hidden = self._hidden([record.tokens for record in records], (step, 0))
        rows = torch.tensor([(i, each.prompt - 1 + k) for i, each in enumerate(records) for k in (0, 1)]).T
        labels = torch.cat([record.tokens[record.prompt :] for record in records])
        logits = self.model.lm_head(hidden[rows[0], rows[1]])
        return torch.nn.functional.cross_entropy(logits, labels)

    @torch.no_grad()
    def accuracy(self, records: Sequence[Record], labels: Tensor) -> float:
        """The share of reviews whose own label is likelier than the other one."""
        right = []
        for start in range(0, len(records), BATCH):
            some = records[start : start + BATCH]
            hidden = self._hidden([record.tokens[: record.prompt] for record in some], (10**6, start))
            last = hidden[torch.arange(len(some)), [record.prompt - 1 for record in some]]
            found = labels[self.model.lm_head(last)[:, labels].argmax(dim=1)]
            right.append(found == torch.stack([record.tokens[record.prompt] for record in some]))
        return float(torch.cat(right).float().mean())

    def _hidden(self, texts: Sequence[Tensor], place: tuple[int, int]) -> Tensor:
        # Attention is causal, so what stands behind a text does not matter to it.
        padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        self._lengths = [len(text) for text in texts]
        self._mask = torch.arange(padded.shape[1]) < torch.tensor(self._lengths)[:, None]
        self._place = place
        hidden: Tensor = self.model.model(padded, use_cache=False).last_hidden_state
        return hidden

    def _leave(self, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        self.sent = output[self._mask]
        if self.noise is None:
            return output
        self.sent = self.noise.activations(self.sent, self._lengths, *self._place)
        return output.masked_scatter(self._mask[:, :, None], self.sent)

    def _come_back(self, layer: Any, inputs: Any, output: Tensor) -> None:
        self.last = output[self._mask].detach()
        if output.requires_grad:
            output.register_hook(self._return)

    def _return(self, gradient: Tensor) -> Tensor:
        self.returned = gradient[self._mask]
        if self.noise is None:
            return gradient
        self.returned = self.noise.gradients(self.returned, self._lengths, *self._place)
        return gradient.masked_scatter(self._mask[:, :, None], self.returned)
