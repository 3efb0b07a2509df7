"""A small GPT of Megatron's and data for it, to run the plug-in and Megatron-Core's own schedules on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.megatron_on_cpu import OnCpu
from megatron_mux.pipeline.plugin import Bucket
from megatron_mux.runtime import Parallel

VOCABULARY, HIDDEN, LAYERS = 48, 16, 4
BUCKETS = (Bucket("short", 5, 6, 2), Bucket("long", 2, 24, 1), Bucket("middle", 3, 12, 3))
TOTAL = sum(bucket.micro_batches for bucket in BUCKETS)

Batch = tuple[Tensor, Tensor]


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron's attention forks a generator for its dropout, and its schedules count tokens, on "cuda"."""
    from megatron.core import tensor_parallel

    before = tensor_parallel.get_cuda_rng_tracker
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    try:
        with OnCpu():
            yield
    finally:
        tensor_parallel.get_cuda_rng_tracker = before


class Norm(torch.nn.LayerNorm):
    """Megatron's own on CPUs is torch's too, but knows nothing of rows that are divided among tensor ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        super().__init__(hidden_size, eps)


def small_gpt(parallel: Parallel) -> Any:
    """This stage of it, all of it trainable, in fp64."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=parallel.tp_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pp_size,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(1)
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * (LAYERS // parallel.pp_size), Norm),
        VOCABULARY,
        32,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
    )
    return model.double()


def batches_of(bucket: Bucket, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed + bucket.seq_length)
    shape = (bucket.micro_batch_size, bucket.seq_length + 1)
    drawn = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(bucket.micro_batches)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def mean(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss function of Megatron's elder kind: the mean of a micro-batch."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"lm loss": loss.detach().clone()}


def counted(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of its newer kind: a sum and the number of tokens, here of those with an even label."""
    chosen = (labels % 2 == 0).flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    total = (losses * chosen).sum()
    return total, chosen.sum().int(), {"lm loss": torch.stack([total.detach(), chosen.sum()])}


def step(loss: Callable[..., Any], batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    tokens, labels = next(batches)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)

    def of_output(output: Tensor, non_loss_data: bool = False) -> Any:
        return output.sum() if non_loss_data else loss(labels, output)

    return model(tokens, positions, None), of_output


def megatrons(model: Any, loss: Callable[..., Any], bucket: Bucket, **more: Any) -> list[Any]:
    """What Megatron-Core's own function for this pipeline makes of one bucket."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    given = {"data_iterator": iter(batches_of(bucket)), "num_microbatches": bucket.micro_batches, **more}
    losses: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(step, loss),
        model=model,
        seq_length=bucket.seq_length,
        micro_batch_size=bucket.micro_batch_size,
        **given,
    )
    return losses


def ours(
    schedule: Callable[..., Any], model: Any, loss: Callable[..., Any], data: Any, **more: Any
) -> list[Any]:
    given = {"num_microbatches": TOTAL, "seq_length": 1, "micro_batch_size": 1, **more}
    losses: list[Any] = schedule(
        forward_step_func=partial(step, loss), data_iterator=data, model=model, **given
    )
    return losses


def gradients(model: Any) -> dict[str, Tensor]:
    """Taken out of the model: the next call begins without any."""
    taken = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return taken


def assert_same(
    found: tuple[list[Any], dict[str, Tensor]], expected: tuple[list[Any], dict[str, Tensor]]
) -> None:
    """Losses and gradients, on both ranks: a failure of one alone would leave the other waiting in the next test."""
    problems: list[str] = []
    if len(found[0]) != len(expected[0]):
        problems.append(f"{len(found[0])} losses instead of {len(expected[0])}")
    both = enumerate(zip(found[0], expected[0], strict=False))
    pairs = [(f"loss {i}", own["lm loss"], theirs["lm loss"]) for i, (own, theirs) in both]
    pairs += [(name, gradient, expected[1][name]) for name, gradient in found[1].items()]
    for name, a, b in pairs:
        if a is None or b is None or not torch.allclose(a, b, rtol=1e-10, atol=1e-13):
            problems.append(name)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problems)
    assert not any(everywhere), everywhere
