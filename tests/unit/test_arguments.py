"""The command line: what is taken, what is refused and in which words."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.arguments import MuxArguments, add_mux_args, build_parser, parse_args
from megatron_mux.arguments.megatron_flags import MEGATRON_FLAGS, Treatment, flags_by
from megatron_mux.errors import UserError
from tests.unit.parsed import REQUIRED, parse, problems_of

pytestmark = pytest.mark.versions

TWO_STAGES = "--pipeline-model-parallel-size 2"


@pytest.mark.usefixtures("place")
def test_defaults() -> None:
    arguments = parse()
    assert arguments == MuxArguments(
        backbone=Path("model"),
        tokenizer_model=None,
        use_checkpoint_args=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        pipeline_model_parallel_layout=None,
        num_virtual_stages_per_pipeline_rank=None,
        num_layers_per_virtual_pipeline_stage=None,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        mux_expert_placement=None,
        mux_expert_topology=None,
        mux_replace_experts=None,
        mux_expert_managers=None,
        mux_expert_capacity=(),
        sequence_parallel=False,
        distributed_backend=None,
        distributed_timeout_minutes=10,
        bf16=False,
        mux_fp32=False,
        mux_tf32=False,
        recompute_granularity=None,
        seed=1234,
        save=None,
        load=None,
        break_lock=False,
        save_interval=None,
        exit_interval=None,
        exit_duration_in_mins=None,
        exit_signal_handler=False,
        exit_signal="SIGTERM",
        exit_on_missing_checkpoint=False,
        log_interval=10,
        tensorboard_dir=None,
        mux_tasks=Path("tasks.yaml"),
        mux_policy="auto",
        mux_layer_split="cost",
        mux_schedule="planned",
        mux_plan=None,
        mux_align="dense",
        mux_interleave="auto",
        mux_communication_ctas=None,
        mux_chunk_size="auto",
        mux_memory_limit="auto",
        mux_backbone_weights="resident",
        mux_backbone_dtype=None,
        mux_watch=None,
        mux_data_cache=None,
        mux_micro_batches=None,
        mux_keep_checkpoints=None,
        mux_save_rate=None,
        mux_rolling=True,
        mux_no_progress=False,
        shape={},
        without_effect=(),
    )


@pytest.mark.usefixtures("place")
def test_everything_given() -> None:
    arguments = parse_args(
        "--backbone=model --mux-tasks tasks.yaml --tensor-model-parallel-size 2 --pipeline-model-parallel-size=3 "
        "--sequence-parallel --bf16 --seed 5 --save out --load out --save-interval 7 --log-interval 1 "
        "--tensorboard-dir tb --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--distributed-backend gloo --distributed-timeout-minutes 3 --mux-policy serial --mux-micro-batches 4 "
        "--mux-keep-checkpoints 2 --mux-backbone-weights sharded --mux-no-progress "
        "--context-parallel-size 1 --expert-model-parallel-size 1 "
        "--hidden-dropout 0.0 --attention-dropout 0 --num-layers 3 --swiglu --rotary-base 10000".split()
    )
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (2, 3)
    assert (arguments.save, arguments.load, arguments.save_interval) == (Path("out"), Path("out"), 7)
    assert (arguments.mux_policy, arguments.mux_micro_batches, arguments.mux_keep_checkpoints) == (
        "serial",
        4,
        2,
    )
    assert arguments.distributed_timeout_minutes == 3
    assert parse("--distributed-timeout-minutes", "0.2").distributed_timeout_minutes == 0.2
    assert arguments.mux_backbone_weights == "sharded"
    assert arguments.shape == {"--num-layers": 3, "--swiglu": True, "--rotary-base": 10000.0}
    assert str(arguments.dtype) == "torch.bfloat16"
    assert str(parse().dtype) == "torch.float32"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("words", "said"), [
    ("--lr 3", "--lr: this is per task: see tasks.yaml (training.learning_rate)"),
    ("--train-iters=9", "--train-iters: this is per task: see tasks.yaml (training.max_steps or "),
    ("--micro-batch-size 1", "this is per task: see tasks.yaml (training.per_device_train_batch_size)"),
    ("--global-batch-size 1", "this is per task: see tasks.yaml (training.per_device_train_batch_size and "),
    ("--data-path a b c", "this is per task: see tasks.yaml (data.path)"),
    ("--fp16", "--fp16: fp16 is not supported: use --bf16"),
    ("--bf16 --mux-fp32", "--mux-fp32: contradicts --bf16: remove one of them"),
    ("--mux-expert-capacity 4", "--mux-expert-capacity: needs --mux-expert-managers"),
    *(
        (f"--mux-expert-managers 2 --{kind}-parallel-size 2", f"--{kind}-parallel-size 2: contradicts --mux-expert-m")
        for kind in ("tensor-model", "pipeline-model", "expert-model", "expert-tensor")
    ),
    (
        "--mux-expert-managers auto --mux-backbone-weights offloaded",
        "--mux-backbone-weights offloaded: not with --mux-expert-managers yet",
    ),
    ("--use-torch-fsdp2", "--use-torch-fsdp2: adapters are small, only frozen weights are sharded: use --mux-"),
    ("--cpu-offloading-num-layers 3", "use --recompute-granularity, or --mux-backbone-weights offloaded"),
    ("--fp8-format hybrid", "--fp8-format: products are not computed in fp8 or fp4; --mux-backbone-dtype"),
    ("--muon-nesterov", "--muon-nesterov: is not one of the optimizers here: choose training.optim in"),
    ("--exit-signal SIGKILL", "--exit-signal: must be a signal such as SIGUSR1, got 'SIGKILL'"),
    ("--exit-duration-in-mins 0", "--exit-duration-in-mins: must be a number of minutes"),
    ("--exp-avg-dtype bf16", "--exp-avg-dtype: only fp32 is supported, got 'bf16': adapters and their"),
    ("--finetune --load out", "--finetune: a resumed task has all that was saved"),
    ("--tokenizer-model org/gpt2", "--tokenizer-model: org/gpt2: no such directory, and no model of that name in"),
    ("--manual-gc=3", "--manual-gc: ignored explicit argument '3'"),
    ("--mux-backbone-weights away", "--mux-backbone-weights: invalid choice: 'away'"),
    ("--tokenizer-type X", "got 'X': the tokenizer is the one in --backbone"),
    ("--use-mcore-model", "--use-mcore-model: unknown flag: did you mean --use-mcore-models?"),
    ("--lora-rank 8", "--lora-rank: is not supported: remove it"),
    ("--mux-task t", "--mux-task: unknown flag: did you mean --mux-tasks?"),
    ("--tensor_model_parallel_size 2", "did you mean --tensor-model-parallel-size?"),
    ("--tensor-model-parallel 2", "unknown flag: did you mean --tensor-model-parallel-size?"),
    ("--learning-speed 2", "--learning-speed: is not supported"),
    ("stray", "stray: unexpected"),
    ("-x", "-x: unexpected"),
    ("--seed x", "--seed: must be a whole number of at least 0, got 'x'"),
    ("--seed", "--seed: expected one argument"),
    ("--save-interval 0 --save out", "--save-interval: must be a whole number of at least 1, got '0'"),
    ("--save-interval 3", "--save-interval: needs --save DIR"),
    ("--mux-keep-checkpoints 3", "--mux-keep-checkpoints: needs --save DIR"),
    ("--mux-memory-limit lots", "--mux-memory-limit: must be a size such as 16GiB or 24000MB, got 'lots'"),
    ("--mux-memory-limit 0", "--mux-memory-limit: must be more than nothing, got '0'"),
    ("--mux-chunk-size 0", "--mux-chunk-size: must be a whole number of at least 1, got '0'"),
    ("--mux-plan nowhere", "--mux-plan nowhere: no such file"),
    (
        "--mux-policy spatial --mux-memory-limit 1G",
        "--mux-memory-limit: --mux-policy spatial does not respect it: use --mux-policy auto",
    ),
    (
        "--mux-policy serial --mux-memory-limit 1G",
        "--mux-memory-limit: --mux-policy serial does not respect it: use --mux-policy auto",
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank: needs --pipeline-model-parallel-size of at least 2",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout X --decoder-last-pipeline-num-layers 2",
        "--pipeline-model-parallel-layout already sets all stages: remove it",
    ),
    (
        "--pipeline-model-parallel-size 2 --mux-layer-split even --decoder-first-pipeline-num-layers 3",
        "--mux-layer-split even: contradicts --decoder-first-pipeline-num-layers",
    ),
    (
        f"{TWO_STAGES} --decoder-last-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2",
        "--decoder-last-pipeline-num-layers: counts a rank's layers in Megatron",
    ),
    ("--mux-policy fast", "--mux-policy: invalid choice: 'fast' (choose from "),
    ("--context-parallel-size 2", "--context-parallel-size: only 1 is supported, got '2': context parallelism is not"),
    ("--expert-model-parallel-size 0", "--expert-model-parallel-size: must be a whole number of at least 1, got '0'"),
    ("--hidden-dropout 0.1", "--hidden-dropout: only 0 is supported, got '0.1'"),
    ("--recompute-granularity some", "--recompute-granularity: invalid choice: 'some'"),
    ("--recompute-num-layers 1", "--recompute-num-layers: needs --recompute-granularity full"),
    ("--num-layers x", "--num-layers: invalid int value: 'x'"),
    ("--save model", "--save model: is the backbone's directory"),
    ("--save tasks.yaml", "--save tasks.yaml: is not a directory"),
    ("--load model", "--load model: is a model, not a run of megatron-mux: use --backbone model"),
    ("--mux-watch nowhere", "--mux-watch nowhere: no such directory"),
    ("--backbone nowhere", "--backbone nowhere: no such directory"),
    ("--mux-communication-ctas 4", "needs --tensor-model-parallel-size of at least 2"),
    ("--tensor-model-parallel-size 2 --mux-communication-ctas 33", "must be a whole number from 1 to 32, got '33'"),
    (
        "--tensor-model-parallel-size 2 --mux-communication-ctas 4 --mux-interleave off",
        "bounds hidden messages, and this run hides none",
    ),
    ("--tensor-model-parallel-size 2 --mux-communication-ctas 0", "must be a whole number from 1 to 32"),
    ("--mux-tasks nowhere", "--mux-tasks nowhere: no such file"),
    ("--mux-tasks model", "--mux-tasks model: is a directory"),
])  # fmt: skip
def test_what_is_refused_and_how(words: str, said: str) -> None:
    problems = problems_of(*REQUIRED, *words.split())
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.usefixtures("place")
def test_a_task_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "manifests").mkdir(parents=True)
    (tmp_path / "run" / "manifests" / "manifest-00000001.json").touch()
    (tmp_path / "run" / "a" / "checkpoint-3").mkdir(parents=True)
    (problem,) = problems_of(*REQUIRED, "--load", str(tmp_path / "run" / "a"))
    assert problem.endswith(f"/a: is a task's directory: give its run's, {tmp_path / 'run'}")


@pytest.mark.usefixtures("place")
def test_empty_paths() -> None:
    assert problems_of(*REQUIRED, "--save", "") == ["--save: must be a path, got ''"]


@pytest.mark.usefixtures("place")
def test_all_wrong_flags_at_once() -> None:
    problems = problems_of("--lr", "1", "--fp16", "--nonsense-flag", "--lr", "2")
    assert [p.split(":")[0] for p in problems] == ["--lr", "--fp16", "--nonsense-flag"]
    assert [p.split(":")[0] for p in problems_of("--seed", "3")] == ["--backbone", "--mux-tasks"]


def test_what_load_may_be_given(place: Path) -> None:
    for name, inside, said in (
        ("megatron", "latest_checkpointed_iteration.txt", "use --backbone"),
        ("sharded", "iter_0000100/x", "use --backbone"),
        ("weights", "model.safetensors", "use --backbone"),
        ("adapter", "adapter_config.json", "adapter_name_or_path"),
    ):
        file = place / name / inside
        file.parent.mkdir(parents=True)
        file.write_text("")
        (problem,) = problems_of(*REQUIRED, "--load", name)
        assert said in problem
    (place / "run" / "manifests").mkdir(parents=True)
    (place / "run" / "iter_0000001").mkdir()  # a task may have any name
    (place / "empty").mkdir()
    for name in ("run", "empty", "missing"):
        assert parse("--load", name).load == Path(name)


# -- the parser itself


def test_help_shows_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for word in (
        "backbone:",
        "parallelism:",
        "results:",
        "mux:",
        "--mux-watch DIR",
        "--num-layers",
        "tasks.yaml",
    ):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_mux_group_suits_a_megatron_script() -> None:
    parser = argparse.ArgumentParser()
    assert add_mux_args(parser) is parser
    parsed = parser.parse_args(["--mux-tasks", "t.yaml"])
    assert (parsed.mux_tasks, parsed.mux_policy) == (Path("t.yaml"), "auto")
    assert all(key.startswith("mux_") for key in vars(parsed))


def accepted() -> set[str]:
    return {option for action in build_parser()._actions for option in action.option_strings}


def test_what_the_table_accepts_is_what_the_parser_takes() -> None:
    ours = {
        flag
        for flag in accepted()
        if not flag.startswith(("--mux-", "--no-mux-", "--backbone", "--break-lock", "--help", "-h"))
    }
    kinds: tuple[Treatment, ...] = ("honoured", "fixed", "without effect")
    assert ours == set().union(*(flags_by(kind) for kind in kinds))


@pytest.mark.usefixtures("place")
def test_every_other_flag_of_megatron_is_refused_with_its_reason() -> None:
    refused = sorted(MEGATRON_FLAGS.keys() - accepted())
    for flag, problem in zip(refused, problems_of(*refused), strict=True):
        assert problem.startswith(f"{flag}: ") and MEGATRON_FLAGS[flag].reason in problem
        assert MEGATRON_FLAGS[flag].reason


def test_the_table_has_the_flags_of_megatrons_own_parser() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    theirs = actions.keys() - {"-h", "--help"}
    assert theirs == {name for name, flag in MEGATRON_FLAGS.items() if not flag.is_old}
    for name, flag in flags_by("without effect").items():
        if not flag.is_old:
            several = {None: "VALUE", 0: ""}
            assert flag.value == several.get(cast(Any, actions[name].nargs), "VALUE..."), name
    assert {kind: len(theirs & flags_by(kind).keys()) for kind in get_args(Treatment)} == {
        "honoured": 66, "fixed": 12, "without effect": 253, "per task": 63, "refused": 451,
    }  # fmt: skip


@pytest.mark.usefixtures("place")
def test_flags_without_effect_are_taken_with_their_values_and_named() -> None:
    given = [
        "--use-mcore-models",
        "--num-workers=2",
        "--finetune",
        "--ddp-num-buckets",
        "3",
        "--num-workers",
        "4",
    ]
    arguments = parse(*given, "--cuda-graph-scope", "attn", "mlp", "--seed", "7")
    assert arguments.seed == 7
    assert arguments.without_effect == (
        "--use-mcore-models", "--num-workers", "--finetune", "--ddp-num-buckets", "--cuda-graph-scope",
    )  # fmt: skip


def test_a_tokenizer_is_a_directory_or_a_file_in_it(place: Path) -> None:
    (place / "model" / "tokenizer.json").touch()
    for path in ("model", "./model/", "model/tokenizer.json"):
        parsed = parse("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path)
        assert parsed.tokenizer_model == Path(path)


words = st.sampled_from(sorted(MEGATRON_FLAGS)) | st.sampled_from(REQUIRED) | st.text(max_size=8)


@given(
    st.lists(words | words.map(lambda w: f"--{w}=3"), max_size=6).filter(
        lambda w: not {"-h", "--help"} & set(w)
    )
)
def test_any_words_are_answered_not_crashed_on(argv: list[str]) -> None:
    try:
        parse_args(argv)
    except UserError as error:
        assert error.problems
