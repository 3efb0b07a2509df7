"""A usual command line of Megatron's `pretrain_gpt.py`, and its flags that end a run early."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from megatron_mux.arguments import parse_args
from megatron_mux.arguments.megatron_flags import MEGATRON_FLAGS
from megatron_mux.errors import UserError
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, Workplace

MODEL = """
--num-layers 4 --hidden-size 32 --ffn-hidden-size 56 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --max-position-embeddings 128 --position-embedding-type rope --rotary-base 10000
--rotary-percent 1.0 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
--use-mcore-models --transformer-impl transformer_engine --use-flash-attn --attention-softmax-in-fp32
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion
--make-vocab-size-divisible-by 128 --seed 7 --bf16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model BACKBONE
"""
DISTRIBUTED = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --distributed-backend gloo
--distributed-timeout-minutes 60 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--accumulate-allreduce-grads-in-fp32 --no-gradient-accumulation-fusion --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --manual-gc --manual-gc-interval 100
--calculate-per-token-loss --cross-entropy-loss-fusion
"""
RESULTS = """
--save SAVE --save-interval 500 --ckpt-format torch_dist --async-save --ckpt-fully-parallel-load
--dist-ckpt-strictness log_all --auto-detect-ckpt-format --no-load-optim --no-load-rng --finetune --log-interval 1
--log-throughput  --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --timing-log-level 0 --tensorboard-queue-size 100
--exit-duration-in-mins 230 --exit-signal-handler --num-workers 2 --no-create-attention-mask-in-dataloader
--reset-position-ids
"""
PER_TASK = """
--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --train-iters 1000 --micro-batch-size 1
--global-batch-size 64 --seq-length 64 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1
--data-path corpus_text_document --split 990,8,2 --eval-iters 10 --eval-interval 500
"""


@pytest.mark.versions
def test_a_usual_line_trains_with_one_line_of_notice(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    given = f"{MODEL} {DISTRIBUTED} {RESULTS}".replace("BACKBONE", str(workplace.backbone))
    line = given.replace("SAVE", str(tmp_path)).split()
    flags = re.findall(r"--[a-z]\S+", f"{MODEL} {DISTRIBUTED} {RESULTS} {PER_TASK}")
    assert len(flags) == len(set(flags)) == 88
    with pytest.raises(UserError) as caught:
        parse_args(workplace.arguments(*line, *PER_TASK.split()))
    assert [problem.split(":")[0] for problem in caught.value.problems] == re.findall(
        "--[a-z0-9-]+", PER_TASK
    )
    assert all("this is per task: see tasks.yaml (" in problem for problem in caught.value.problems)
    run = server.run(workplace.arguments(*line))
    assert run.status == 0, run.errors
    told = " ".join((run.output + run.errors).split())  # lines are wrapped
    without = [flag for flag in flags if MEGATRON_FLAGS[flag].treatment == "without effect"]
    assert told.count("without effect") == 1
    assert f"accepted without effect here: {', '.join(without)} " in told
    assert (tmp_path / "lora" / "checkpoint-14").is_dir()


def test_a_run_exits_on_the_signal_that_was_chosen(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    endless = {**TASKS["lora"], "training": {**TASKS["lora"]["training"], "max_steps": 100_000}}
    tasks = workplace.write_tasks("endless.yaml", {"lora": endless})
    flags = ["--save", str(tmp_path), "--exit-signal-handler", "--exit-signal", "SIGUSR1"]
    metrics = tmp_path / "lora" / "metrics.jsonl"
    run = server.run(
        workplace.arguments(*flags, tasks=tasks),
        kill_after=lambda: metrics.exists() and '"loss"' in metrics.read_text(),
        signal_number=signal.SIGUSR1,
    )
    assert run.status == 0, run.errors
    assert "stopped by a signal: every task is saved" in run.output


def test_a_missing_checkpoint_ends_a_run_that_says_so(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    run = server.run(workplace.arguments("--load", nowhere, "--exit-on-missing-checkpoint"))
    assert run.status == 2
    assert "no checkpoint there (--exit-on-missing-checkpoint)" in " ".join(run.errors.split())
