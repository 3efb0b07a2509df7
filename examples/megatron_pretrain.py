"""Megatron's own `pretrain` with three data sources of different lengths, through the multi-bucket schedule.

    torchrun --nproc-per-node 2 examples/megatron_pretrain.py --pipeline-model-parallel-size 2 --train-iters 20

A tiny GPT learns arithmetic progressions. The loop, the model, the optimizer and the flags are Megatron's; only the
function that returns the loop's schedule is replaced. With `--schedule megatron` it is not, for comparison: Megatron's
own 1F1B then exchanges the shape of every tensor before sending it. The losses are the same.

The example needs `megatron.training`, which Megatron-Core has since 0.19. Without a GPU it runs on the CPU. On GPUs
without Transformer Engine and apex, add `--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
--no-gradient-accumulation-fusion`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_mux.megatron_on_cpu import FLAGS, use_cpu
from megatron_mux.pipeline.plugin import Bucket, multi_bucket

SOURCES = (Bucket("short", 4, 16, 4), Bucket("long", 2, 64, 1), Bucket("medium", 3, 32, 2))
VOCABULARY = 128
MODEL = (
    f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size {VOCABULARY} --max-position-embeddings 64 "
    "--seq-length 64 --micro-batch-size 1 --tokenizer-type NullTokenizer --calculate-per-token-loss "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-style constant --train-iters 10 --eval-iters 1 "
    "--eval-interval 5 --log-interval 1 --dataloader-type external"
).split()
"""Default flags for Megatron, which flags of the command line override."""


class Progressions:
    """Iterator over the micro-batches of all sources; the progressions of a source share a step and start at random.

    Args:
        seed: Seed of the random starts.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._iterator = self._micro_batches()

    def __next__(self) -> Tensor:
        """Return the next micro-batch: tokens `[sequences, L + 1]`."""
        return next(self._iterator)

    def _micro_batches(self) -> Iterator[Tensor]:
        while True:
            for step, source in enumerate(SOURCES, start=1):
                for _ in range(source.micro_batches):
                    start = torch.randint(VOCABULARY, (source.micro_batch_size, 1), generator=self._generator)
                    yield (start + step * torch.arange(source.seq_length + 1)) % VOCABULARY


def data(samples: Any) -> tuple[Progressions, Progressions, None]:
    """Make the training, validation and test data, the same on all ranks of one data-parallel replica."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    return Progressions(1 + rank), Progressions(1001 + rank), None


data.is_distributed = True  # type: ignore[attr-defined]


def forward_step(batches: Progressions, model: Any) -> tuple[Tensor, Any]:
    """Run a micro-batch through this stage; returns its output and the loss function."""
    tokens = next(batches).cuda()
    positions = torch.arange(tokens.size(1) - 1, device=tokens.device).expand(tokens.size(0), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), loss


def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss summed over a micro-batch's tokens, the number of tokens, and both for the log."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our flag to Megatron's parser."""
    group = parser.add_argument_group("multi-bucket schedule")
    group.add_argument("--schedule", choices=("multi-bucket", "megatron"), default="multi-bucket")
    return parser


def arguments() -> Namespace:
    """Parse and check Megatron's arguments, and set them as its global ones."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    args: Namespace = parse_args(flags)
    pipelines = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    args.global_batch_size = pipelines * sum(source.micro_batches for source in SOURCES)
    validate_args(args)
    set_global_variables(args)
    return args


def main() -> None:
    """Train."""
    on_cpu = not torch.cuda.is_available()
    sys.argv[1:1] = MODEL + (FLAGS if on_cpu else [])
    try:
        from megatron.training import training
    except ModuleNotFoundError as error:
        sys.exit(f"megatron.training cannot be imported ({error}): install megatron-core 0.19 (Python 3.12)")
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    if on_cpu:
        use_cpu()
    # Megatron would compile its index builder, which the installed package has compiled already, without a makefile.
    dataset_utils.compile_helpers = lambda: None
    args = arguments()
    model = gpt_config_from_args(args)
    if args.schedule == "multi-bucket":
        schedule = multi_bucket(SOURCES)
        training.get_forward_backward_func = lambda *args, **kwargs: schedule
    else:
        model.transformer.variable_seq_lengths = (
            True  # exchange each tensor's shape, which our schedule knows in advance
        )
    training.pretrain(
        pretrain_cfg_container_from_args(args, model), data, ModelType.encoder_or_decoder, forward_step
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
