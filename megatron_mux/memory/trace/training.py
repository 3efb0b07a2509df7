"""Records training steps of `transformers` + `peft`, as `transformers.Trainer` takes them on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from megatron_mux.attributes import replaced
from megatron_mux.memory.fake_gpu.device import DEVICE, fake_gpu
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import (
    BACKWARD,
    CLEAR,
    FORWARD,
    INPUTS,
    OPTIMIZER,
    StepPosition,
)
from megatron_mux.memory.kernel_scratch import scratch_of
from megatron_mux.memory.optimizers import OPTIMIZERS
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.model import (
    build,
    configuration,
    decoder_layers,
    label_parameters,
    label_trained,
    materialise,
)

_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]  # Trainer's


def trace(case: Case) -> Stream:
    """Trace the steps of a case with fake tensors on a fake GPU. Call it in a process of its own: see `Worker`.

    Raises:
        NoFakeGpu: This process cannot simulate a GPU.
        UntraceableError: The case cannot be traced.
    """
    training = _Training(case, DEVICE, fake=True)
    with fake_gpu(case.gpu), _as_if_real():
        return training.run()


def count(case: Case) -> Stream:
    """Record the same steps while computing them in host memory. All weights are the same small number."""
    return _Training(case, torch.device("cpu"), fake=False).run()


class _Training:
    """A model, its optimizer and its steps."""

    def __init__(self, case: Case, device: torch.device, fake: bool) -> None:
        self._case, self._device, self._fake = case, device, fake
        self._model = build(case)
        self._place = StepPosition()
        config = configuration(case.config, case.layers).get_text_config()
        self._vocabulary = int(config.vocab_size)
        fakes = (self._answer, scratch_of) if fake else (None, None)
        self._recorder = Recorder(self._place, device.type, self._vocabulary, *fakes)

    def run(self) -> Stream:
        """All steps."""
        case, model = self._case, self._model
        with self._recorder, self._follow_prefixes():
            materialise(model, self._device, fill=not self._fake)
            label_parameters(self._recorder, model, case)
            self._place.follow(list(decoder_layers(model, case.layers)))
            optimizer = _optimizer(model, case)
            half = case.autocast == "float16"
            scaler = torch.amp.GradScaler(self._device.type, enabled=half)
            for _ in range(case.steps):
                self._step(model, optimizer, scaler)
            return self._recorder.done()

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        case, place = self._case, self._place
        for _ in range(2 if case.accumulate else 1):
            place.enter(INPUTS)
            inputs = self._inputs()
            place.enter(FORWARD)
            loss = self._loss(model, inputs)
            place.enter(BACKWARD)
            scaler.scale(loss).backward()
            label_trained(self._recorder, model, case, optimizer)
        place.enter(OPTIMIZER)
        if case.clip is not None:
            scaler.unscale_(optimizer)
            # `foreach` is the default for real tensors on a GPU.
            nn.utils.clip_grad_norm_(model.parameters(), case.clip, foreach=True)
        with self._recorder.stepping(OPTIMIZERS[case.optimizer].in_turn):
            scaler.step(optimizer)
        scaler.update()
        label_trained(self._recorder, model, case, optimizer)
        place.enter(CLEAR)
        model.zero_grad()

    def _loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the forward pass; all results but the loss are freed."""
        if self._case.autocast is None:
            return model(**inputs).loss  # type: ignore[no-any-return]
        from accelerate.utils.operations import convert_to_fp32

        with torch.autocast(self._device.type, dtype=getattr(torch, self._case.autocast)):
            results = model(**inputs)
        return convert_to_fp32(results).loss  # type: ignore[no-any-return]

    def _inputs(self) -> dict[str, torch.Tensor]:
        """A batch of [B, L] tensors, as a data collator makes it."""
        shape = self._case.batch, self._case.length
        tokens = torch.zeros(shape, dtype=torch.long, device=self._device)
        mask = torch.ones(shape, dtype=torch.long, device=self._device)
        if self._case.padded and not self._fake:
            mask[0, -1] = 0
        labels = torch.zeros(shape, dtype=torch.long, device=self._device)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def _answer(self, tensor: torch.Tensor) -> Any:
        """The value of a fake tensor: whether there is padding, a step number, or that no gradient is infinite."""
        if tensor.dtype == torch.bool:
            return not self._case.padded
        number = 0 if tensor.device.type == "cuda" else 1
        return float(number) if tensor.is_floating_point() else number

    @contextlib.contextmanager
    def _follow_prefixes(self) -> Iterator[None]:
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        with contextlib.ExitStack() as stack:
            for kind in (DynamicLayer, DynamicSlidingWindowLayer):
                update = self._place.following_prefixes(kind.update)
                stack.enter_context(replaced(kind, "update", update))
            yield


@contextlib.contextmanager
def _as_if_real() -> Iterator[None]:
    """Inside, `transformers` treats fake tensors like real ones.

    It would make masks for fake tensors that real ones do not need. And torch's fake kernel of grouped products only
    supports bf16: other precisions use the fallback of `transformers`, which allocates the same.
    """
    from transformers.integrations import moe
    from transformers.utils import import_utils

    can_use = moe._can_use_grouped_mm

    def usable(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and bool(can_use(rows, weight, offsets))

    with (
        replaced(import_utils, "is_fake_tensor", lambda _: False),
        replaced(moe, "_can_use_grouped_mm", usable),
    ):
        yield


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """The optimizer as `Trainer` makes it: weights that decay first, then biases and norms."""
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if (name in decayed) == first], "weight_decay": 0.0}
        for first in (True, False)
    ]
    return _MADE[case.optimizer](groups)


# `foreach` is the default for real tensors on a GPU.
_MADE: Mapping[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw_torch_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "adamw_torch": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adafactor": partial(Adafactor, lr=1e-4, scale_parameter=False, relative_step=False),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-4, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-4, foreach=True),
}
"""Optimizers as `Trainer` makes them, by their names in `TrainingArguments.optim`."""
