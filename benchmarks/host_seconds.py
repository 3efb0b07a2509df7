"""Host seconds of a steady step: what Python and C++ do to launch a step's kernels, which compute nothing here.

    python benchmarks/host_seconds.py [--tasks N]... [--layers L] [--steps N] [--rounds N] [--device cpu|cuda]
        [--targets qv|all-linear] [--profile FUNCTIONS] [--output FILE.json]

64 sequences of two tokens a step, divided among 1, 8 or 64 LoRA tasks of ranks 8 to 64, train on a tiny Llama, in
bursts of steps as in the training loop: no kernel takes longer than its launch. Numbers of tasks take turns in one
process. The table has medians over rounds, of a step and of a layer in it, and the least, which a busy machine changes
less.

On a CPU the engine is made to take a GPU's way: Triton's kernels are bound and launched by Triton's own code, down to
the call of the driver, which does nothing; attention is the variable-length operator of torch, whose kernel does
nothing; optimizers step as on a GPU, and plans are tried first. What this leaves out: CUDA's own seconds for a launch,
some 3 to 5 microseconds each; copies to the device; autograd's thread for the device; and seconds of the kernels of
torch on a few elements, which are counted though a GPU's host does not spend them. With `--device cuda` nothing is
replaced, and the seconds are those of the clock; else they are the processor's in the thread that steps, which other
processes of the machine do not lengthen: the thread that prepares data is left out, and waiting for it.

The step is that of the engine, with its results read on the host; what the training loop reports is not in it.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_bench import ALL_LINEAR, QV, spec_of
from script import add_machine, add_output, command_line, environment, measured_on, publish, table
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
from megatron_mux.engine import Engine, Task, updates
from megatron_mux.kernels.attention import segments as attention
from megatron_mux.kernels.loss import cross_entropy
from megatron_mux.kernels.low_rank import choice as low_rank_choice
from megatron_mux.kernels.pointwise import choice as pointwise_choice
from megatron_mux.runtime import Parallel, initialize, shutdown

SEQUENCES, TOKENS = 64, 2
RANKS = (8, 16, 32, 64)
TARGETS = {"qv": QV, "all-linear": ALL_LINEAR}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The fastest on a few elements; attention in one call needs 16 bits on a GPU."""
WIDTH = {"cpu": 16, "cuda": 64}
"""Of hidden states: four heads of 4, and of 16, the least that a GPU's kernel takes."""


def write_backbone(directory: Path, layers: int, width: int) -> None:
    """Write a Llama so small that no kernel takes long."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


# ---- a GPU whose kernels do nothing ----------------------------------------------------------------------------------


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Output, log-sum-exp, state of random numbers, and two that nobody uses."""
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    nothing = query.new_empty(0, dtype=torch.uint64)
    return torch.zeros_like(query), lse, nothing, nothing, nothing


def _flash_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> tuple[Tensor, ...]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


CHOOSING = (low_rank_choice, pointwise_choice, cross_entropy, updates)
"""Modules that choose Triton kernels where these suit."""

_FIRST = 9
"""Arguments of a launch before the kernel's own: its grid, stream, function, metadata and hooks."""


def _nothing(*_: Any) -> None:
    pass


def _zero_norms(*arguments: Any) -> None:
    """Norms that nobody writes might not be finite: then a task would not go on."""
    arguments[_FIRST].zero_()


def _zero_losses(*arguments: Any) -> None:
    """The same of losses: the largest logit, the sum of exponentials, and the label's logit."""
    _, _, top, total, target, *_ = arguments[_FIRST:]
    top.zero_(), total.fill_(1.0), target.zero_()


_RUNS = {"_row_sums": _zero_norms, "statistics_kernel": _zero_losses}
"""Kernels that do something."""


def _idle_triton() -> None:
    """Have Triton launch kernels on a GPU that is not there: all of its code runs but compilation and the launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    class IdleKernel(CompiledKernel):  # type: ignore[misc]
        """A compiled kernel that does nothing."""

        def __init__(self, src: Any, **_: Any) -> None:
            self.src, self.name, self.metadata = src, src.fn.__name__, None
            self.module, self.function, self.packed_metadata = object(), 0, ()
            self._run = _RUNS.get(self.name, _nothing)

        def __del__(self) -> None:
            pass

    class IdleDriver:
        """What Triton asks of a driver when it launches."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.compiler.compile = IdleKernel
    triton.runtime.driver.set_active(IdleDriver())


@contextmanager
def idle_gpu() -> Iterator[None]:
    """Context in which computing on the CPU takes a GPU's way through our code, and its kernels do nothing."""
    _idle_triton()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash_forward, "CPU")
    library.impl("_flash_attention_backward", _flash_backward, "CPU")

    def suits_triton(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype != torch.float64

    with ExitStack() as stack:
        for module, name, value in (
            *((module, "suits_triton", suits_triton) for module in CHOOSING),
            (attention, "has_one_call", lambda device, dtype: True),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        for known in (pointwise_choice.pointwise_kernels, cross_entropy.is_fused):
            known.cache_clear()
            stack.callback(known.cache_clear)
        yield


# ---- measuring -------------------------------------------------------------------------------------------------------


def make_engine(directory: Path, parallel: Parallel, targets: str, tasks: int, steps: int) -> Engine:
    """An engine with so many tasks, which share the sequences of a step."""
    each = SEQUENCES // tasks
    engine = Engine(
        Backbone.load(directory, parallel, DTYPE[parallel.device.type]), parallel, tries_plans=True
    )
    records: Any = LengthsOnlyDataset([TOKENS] * 4 * each, [TOKENS - 1] * 4 * each)
    specs = [
        spec_of(f"task-{i:02d}", {**TARGETS[targets], "r": RANKS[i % 4]}, each, TOKENS, max_steps=steps)
        for i in range(tasks)
    ]
    engine.register_tasks([Task(spec, records) for spec in specs])
    return engine


def burst(engine: Engine, steps: int) -> float:
    """Seconds of a step, of so many taken at once; without a GPU, those that the processor spends in this thread."""
    clock = time.perf_counter if engine.parallel.device.type == "cuda" else time.thread_time
    start = clock()
    results = engine.steps(steps)
    assert len(results) == steps, results
    return (clock() - start) / steps


def print_profile(engine: Engine, steps: int, bursts: int, functions: int) -> None:
    """What takes the time of a step, by function."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(bursts):
        engine.steps(steps)
    profile.disable()
    print(f"profile of {bursts * steps} steps")
    pstats.Stats(profile).sort_stats("tottime").print_stats(functions)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", type=int, action="append", help="number of tasks; may be repeated")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of a burst")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--targets", choices=TARGETS, default="qv")
    parser.add_argument("--profile", type=int, nargs="?", const=30, metavar="FUNCTIONS")
    add_machine(parser)
    add_output(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts = args.tasks or [1, 8, 64]
    parallel = initialize(device=args.device)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_backbone(directory, args.layers, WIDTH[args.device])
        if args.device == "cpu":
            stack.enter_context(idle_gpu())
        steps = args.steps * (2 * args.rounds + 4)
        engines = [make_engine(directory, parallel, args.targets, count, steps) for count in counts]
        found: list[list[float]] = [[] for _ in engines]
        for number in range(args.rounds + 2):
            for seconds, engine in zip(found, engines, strict=True):
                own = burst(engine, args.steps)
                if number >= 2:  # by then everything is compiled and tried
                    seconds.append(own)
        if args.profile:
            for engine in engines:
                print_profile(engine, args.steps, args.rounds, args.profile)
        for engine in engines:
            engine.close()
    shutdown()
    medians = {str(count): statistics.median(seconds) for count, seconds in zip(counts, found, strict=True)}
    least = {str(count): min(seconds) for count, seconds in zip(counts, found, strict=True)}
    about = environment("a tiny Llama", str(DTYPE[args.device]), 1, args.device)
    result = {
        **about, "device": args.device, "targets": args.targets, "layers": args.layers, "steps": args.steps,
        "rounds": args.rounds, "seconds": medians, "least_seconds": least,
    }  # fmt: skip
    rows = [
        (count, f"{1e3 * value:.2f}", f"{1e3 * value / args.layers:.3f}", f"{1e3 * least[count]:.2f}")
        for count, value in medians.items()
    ]
    lines = table("tasks | ms a step | ms a step and layer | least ms a step", rows)
    what = f"{args.layers} layers, {args.targets}, medians of {args.rounds} bursts of {args.steps} steps."
    publish(result, "\n".join([measured_on(about), what, "", *lines]), args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
