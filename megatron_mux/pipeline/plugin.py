"""As a plug-in: the structured schedule behind the signature of Megatron-Core's schedule functions.

A training loop that calls what Megatron-Core's `get_forward_backward_func()` returns can call this instead:

    schedule = multi_bucket([Bucket("code", 8, 2048, 1), Bucket("chat", 16, 512, 2)])
    losses = schedule(forward_step_func=..., data_iterator=[code, chat], model=model, num_microbatches=24, ...)

The micro-batches of several buckets (data sources or tasks, each with its own sequence length) then share one pass
through the pipeline, with no flush between buckets and no exchange of shapes. Everything else is as Megatron does it:
its model, its callbacks, its loss scaling, its gradient reduction, its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from megatron_mux.pipeline.bucket import BucketCost, sizes_of
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.megatron_stage import (
    BucketInput,
    DataIterator,
    GradientSync,
    MegatronStage,
    StepFunctions,
    of_wrapped,
)
from megatron_mux.pipeline.structured import check_memory, descending, structured
from megatron_mux.pipeline.template import Template
from megatron_mux.runtime import Parallel, adopt

_REFUSED: dict[str, tuple[Any, ...]] = {
    "virtual_pipeline_model_parallel_size": (None, 1),
    "context_parallel_size": (None, 1),
    "hybrid_context_parallel": (None, False),
    "num_moe_experts": (None,),
    "mtp_num_layers": (None, 0),
    "experimental_attention_variant": (None,),
    "overlap_p2p_comm": (None, False),
    "defer_embedding_wgrad_compute": (None, False),
    "fine_grained_activation_offloading": (None, False),
    "num_microbatches_with_partial_activation_checkpoints": (None,),
    "cuda_graph_impl": (None, "none"),
    "enable_cuda_graph": (None, False),
    "external_cuda_graph": (None, False),
}
"""Fields of a model's configuration that ask its schedule for something not supported here, with accepted values."""


@dataclass(frozen=True)
class Bucket:
    """Micro-batches of one data source or task, all of one size.

    Attributes:
        micro_batches: Number of micro-batches in one call.
        seq_length: Tokens per sequence.
        micro_batch_size: Sequences per micro-batch.
        cost: Seconds and bytes of its passes, if known; by default proportional to the operations of a transformer
            layer (seconds) and to tokens (memory). Give it for every bucket or for none.
    """

    name: str
    micro_batches: int
    seq_length: int
    micro_batch_size: int
    cost: BucketCost | None = None

    def __post_init__(self) -> None:
        if min(self.micro_batches, self.seq_length, self.micro_batch_size) < 1:
            raise ValueError(
                f"bucket {self.name!r} needs at least one micro-batch, sequence and token: {self}"
            )
        if self.cost is not None and (self.cost.micro_batches, self.cost.chunks) != (self.micro_batches, 1):
            raise ValueError(
                f"the cost of bucket {self.name!r} must be of {self.micro_batches} uncut micro-batches"
            )


def multi_bucket(
    buckets: Iterable[Bucket], memory_limit: Sequence[float] | None = None, own_means: bool = False
) -> Callable[..., list[Any]]:
    """Bind buckets to a function with the signature of Megatron-Core's schedule functions.

    `num_microbatches` of a call must be the sum over the buckets, on every data-parallel rank; `seq_length` and
    `micro_batch_size` of a call do not count. Its `data_iterator` is a list with an iterator for each bucket, or one
    iterator that yields an item for each micro-batch, bucket after bucket in the order given here.

    Args:
        buckets: Buckets in any order; they enter the pipeline by descending latency.
        memory_limit: `[S]` limit on what a stage keeps for micro-batches that wait for their backward pass, in the unit
            of the costs' memory (tokens if no costs are given); by default what 1F1B keeps for the largest bucket.
        own_means: Take a bucket's loss as the mean over its own micro-batches, as if it were alone (for tasks). By
            default it is the mean over all micro-batches of the call, as in Megatron (for sources of one batch).
    """
    limit = None if memory_limit is None else tuple(memory_limit)
    return partial(
        forward_backward_multi_bucket, buckets=tuple(buckets), memory_limit=limit, own_means=own_means
    )


def forward_backward_multi_bucket(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
    buckets: tuple[Bucket, ...] = (),
    memory_limit: tuple[float, ...] | None = None,
    own_means: bool = False,
) -> list[Any]:
    """Run the forward and backward passes of a step, like Megatron-Core's schedule functions.

    Without buckets all micro-batches form one bucket, and the order of passes is that of 1F1B. `config.param_sync_func`
    is not called, as in Megatron's schedules for one model chunk.

    Args:
        forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, forward_only,
            collect_non_loss_data, first_val_step, pg_collection, force_all_reduce: As in Megatron-Core.
        p2p_communicator: Not used, since transfers are made here; Megatron-Core requires it with `pg_collection`.
        decoder_seq_length, adjust_tensor_shapes_fn: Must be None.
        buckets, memory_limit, own_means: See `multi_bucket`.

    Returns:
        On the last stage, what the loss function reported for each micro-batch, by bucket in the order of `buckets`;
        an empty list on other stages.

    Raises:
        ValueError: Something unsupported is requested, or buckets, data and call do not match.
    """
    model = _single(model)
    config = of_wrapped(model, "config")
    _refuse_undone(config, bool(buckets), decoder_seq_length, adjust_tensor_shapes_fn)
    _refuse_mismatch(forward_only, collect_non_loss_data, p2p_communicator, pg_collection)
    given = _given(buckets, num_microbatches, seq_length, micro_batch_size)
    parallel = adopt(next(model.parameters()).device, config.sequence_parallel, pg_collection)
    order, template = _plan(given, parallel.pp_size, config.hidden_size, memory_limit, forward_only)
    inputs = _inputs(given, data_iterator, parallel, config.hidden_size, 0 if own_means else num_microbatches)
    tell_first = first_val_step is not False or not forward_only
    functions = StepFunctions(forward_step_func, collect_non_loss_data, tell_first)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    stage = _run(model, functions, [inputs[i] for i in order], template, parallel)
    if config.finalize_model_grads_func is not None and not forward_only:
        tokens = stage.tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(
            [model], tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return [stage.data[i] for i in sorted(stage.data, key=lambda i: (order[i.bucket], i.micro_batch))]


def _run(
    model: Any,
    functions: StepFunctions,
    buckets: Sequence[BucketInput],
    template: Template,
    parallel: Parallel,
) -> MegatronStage:
    """Run this stage's actions."""
    backwards = sum(action.kind == "B" for action in template[parallel.pp_rank])
    config = of_wrapped(model, "config")
    sync = GradientSync(config, model.parameters, parallel.is_first_stage)
    stage = MegatronStage(model, functions, buckets, backwards, parallel.is_last_stage, sync)
    communicator = _communicator(parallel)
    dtype = config.pipeline_dtype or config.params_dtype
    execute(template, parallel.pp_rank, stage, communicator, dtype)
    sync.finish(has_gradients=backwards > 0)
    return stage


def _single(model: Any) -> Any:
    """The one model chunk of a list, or the model itself."""
    if not isinstance(model, list):
        return model
    if len(model) != 1:
        raise ValueError(f"model is a list of {len(model)}: several model chunks to a stage are not done")
    return model[0]


def _refuse_undone(
    config: Any, has_buckets: bool, decoder_seq_length: Any, adjust_tensor_shapes_fn: Any
) -> None:
    problems = [
        f"{name}={value!r}"
        for name, allowed in _REFUSED.items()
        if (value := getattr(config, name, None)) not in allowed
    ]
    problems += ["decoder_seq_length"] * (decoder_seq_length is not None)
    problems += ["adjust_tensor_shapes_fn"] * (adjust_tensor_shapes_fn is not None)
    if problems:
        raise ValueError(f"not done in the multi-bucket schedule: {', '.join(problems)}")
    if config.variable_seq_lengths and not has_buckets:
        raise ValueError(
            "variable_seq_lengths: bind the lengths with multi_bucket; shapes are not exchanged here"
        )


def _refuse_mismatch(forward_only: bool, collect_non_loss_data: bool, communicator: Any, groups: Any) -> None:
    if collect_non_loss_data and not forward_only:
        raise ValueError(
            "collect_non_loss_data is done with forward_only alone: there is no loss to back-propagate"
        )
    if (communicator is None) != (groups is None):
        raise ValueError("provide both p2p_communicator and pg_collection, or neither")


def _given(
    buckets: tuple[Bucket, ...], num_microbatches: int, seq_length: int, micro_batch_size: int
) -> tuple[Bucket, ...]:
    """The bound buckets, or one bucket of all micro-batches of the call."""
    given = buckets or (Bucket("all", num_microbatches, seq_length, micro_batch_size),)
    if sum(bucket.micro_batches for bucket in given) != num_microbatches:
        shares = " + ".join(f"{bucket.micro_batches} ({bucket.name})" for bucket in given)
        raise ValueError(f"num_microbatches is {num_microbatches}, but the buckets were bound with {shares}")
    return given


def _plan(
    buckets: Sequence[Bucket],
    stages: int,
    hidden_size: int,
    memory_limit: tuple[float, ...] | None,
    forward_only: bool,
) -> tuple[list[int], Template]:
    """The order in which the buckets enter, and the template for that order."""
    costs = _costs(buckets, stages, hidden_size)
    order = descending(costs)
    limit = _as_1f1b_keeps(costs) if memory_limit is None else memory_limit
    return order, _template(tuple(costs[i] for i in order), limit, forward_only)


def _inputs(
    buckets: Sequence[Bucket], data_iterator: Any, parallel: Parallel, hidden_size: int, divisor: int
) -> list[BucketInput]:
    """The stage's view of each bucket. A divisor of 0 stands for each bucket's own number of micro-batches."""
    return [
        BucketInput(
            bucket.name, _shape(bucket, parallel, hidden_size), divisor or bucket.micro_batches, batches
        )
        for bucket, batches in zip(buckets, _batches(data_iterator, buckets), strict=True)
    ]


def _costs(buckets: Sequence[Bucket], stages: int, hidden_size: int) -> list[BucketCost]:
    """Costs of the buckets: as given, or estimated from their operations and tokens."""
    given = [bucket.cost for bucket in buckets if bucket.cost is not None]
    if given and len(given) < len(buckets):
        raise ValueError("give the cost of every bucket or of none: seconds and operations do not compare")
    if len({any(cost.memory) for cost in given}) > 1:
        raise ValueError(
            "give what every bucket keeps in memory or what none does: bytes and tokens do not compare"
        )
    wrong = [bucket.name for bucket in buckets if bucket.cost is not None and bucket.cost.stages != stages]
    if wrong:
        raise ValueError(f"the costs of {', '.join(map(repr, wrong))} are not for {stages} stage(s)")
    costs = []
    for bucket in buckets:
        tokens = float(bucket.micro_batch_size * bucket.seq_length)
        # A layer's operations for a token: 24 H^2 in its matrices, 2 H L in causal attention; twice as many backward.
        passes = tokens * (12 * hidden_size + bucket.seq_length)
        cost = bucket.cost or BucketCost(bucket.micro_batches, (passes,) * stages, (2 * passes,) * stages)
        costs.append(cost if any(cost.memory) else replace(cost, memory=(tokens,) * stages))
    return costs


def _as_1f1b_keeps(costs: Sequence[BucketCost]) -> tuple[float, ...]:
    """For each stage, the memory of the largest micro-batch times the number of stages from it to the end."""
    stages = costs[0].stages
    return tuple((stages - i) * max(cost.memory[i] for cost in costs) for i in range(stages))


@lru_cache(maxsize=64)
def _template(costs: tuple[BucketCost, ...], memory_limit: tuple[float, ...], forward_only: bool) -> Template:
    """The validated template of buckets in the order in which they enter."""
    stages = costs[0].stages
    if len(memory_limit) != stages:
        raise ValueError(f"memory_limit is for {len(memory_limit)} stage(s), not for {stages}")
    check_memory(costs, memory_limit)
    template = structured(costs, memory_limit)
    if forward_only:
        template = tuple(tuple(action for action in actions if action.kind == "F") for actions in template)
    check(template, sizes_of(costs), stages)
    return template


@lru_cache(maxsize=8)
def _communicator(parallel: Parallel) -> Communicator:
    """The transfers of a stage, cached because on GPUs they need process groups."""
    return Communicator(parallel)


def _shape(bucket: Bucket, parallel: Parallel, hidden_size: int) -> tuple[int, int, int]:
    """`[L, sequences, H]`; with sequence parallelism, a tensor rank's part of the rows."""
    parts = parallel.tp_size if parallel.sequence_parallel else 1
    if bucket.seq_length % parts:
        raise ValueError(
            f"bucket {bucket.name!r}: {parts} tensor ranks cannot divide {bucket.seq_length} tokens"
        )
    return bucket.seq_length // parts, bucket.micro_batch_size, hidden_size


def _batches(data_iterator: Any, buckets: Sequence[Bucket]) -> list[DataIterator]:
    """An iterator for each bucket; None on ranks that read no data."""
    if data_iterator is None:
        return [None] * len(buckets)
    if isinstance(data_iterator, list):
        if len(data_iterator) != len(buckets):
            raise ValueError(f"data_iterator is a list of {len(data_iterator)} for {len(buckets)} bucket(s)")
        return list(data_iterator)
    if len(buckets) == 1:
        return [data_iterator]
    # Buckets enter the pipeline in another order than the iterator yields them: read them all now.
    return [iter([next(data_iterator) for _ in range(bucket.micro_batches)]) for bucket in buckets]
