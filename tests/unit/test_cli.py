"""`megatron-mux`: its commands, how it names models and adapters, and how it starts processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux.arguments.values import model
from megatron_mux.cli import draw, launch, plan, train
from megatron_mux.cli.main import COMMANDS, main
from megatron_mux.errors import UserError
from megatron_mux.hub_cache import find_model, model_id, shown_model
from megatron_mux.saved_files import find_adapter

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_its_flags_under_its_own_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-mux {name} ")


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, megatron_mux\n"
        "from megatron_mux.cli.main import main\n"
        "main(['--help'])\n"
        "assert not {'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    listed = [line.split()[0] for line in run.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)


def test_a_mistyped_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "megatron-mux: trian: unknown command: did you mean train?\n"


def test_errors_bear_the_name_that_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--backbone", "b"]) == 2
    assert capsys.readouterr().err.startswith("megatron-mux merge: ")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with the model `org/tiny`; returns its snapshot."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_model_is_found_by_its_name_on_the_hub(hub: Path, tmp_path: Path) -> None:
    assert find_model("org/tiny") == hub
    assert model_id(hub) == shown_model(hub) == "org/tiny"
    directory = tmp_path / "own"
    directory.mkdir()
    assert find_model(str(directory)) == directory and shown_model(directory) == str(directory)
    assert find_model("no-such-directory") == Path("no-such-directory"), "its reader says what is wrong"
    with pytest.raises(UserError, match=r"org/other: .*`hf download org/other`"):
        find_model("org/other")
    (hub / "config.json").unlink()
    with pytest.raises(UserError, match="hf download org/tiny"):
        find_model("org/tiny")


def test_a_part_of_a_model_is_completed(hub: Path) -> None:
    from megatron_mux.backbone.checkpoint import Checkpoint

    with pytest.raises(UserError, match=r"no \*\.safetensors\. Complete it with `hf download org/tiny`"):
        Checkpoint(model("org/tiny"))


def checkpoint(task: Path, *steps: int) -> None:
    for step in steps:
        (task / f"checkpoint-{step}").mkdir(parents=True)
        (task / f"checkpoint-{step}" / "adapter_config.json").write_text("{}")


def test_an_adapter_is_found_in_its_tasks_and_its_runs_directory(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoint(tmp_path / "run" / "a", 5, 20, 100)
    newest = tmp_path / "run" / "a" / "checkpoint-100"
    for directory in (tmp_path / "run" / "a", tmp_path / "run"):
        assert find_adapter(str(directory), said.append) == newest
        assert said.pop() == f"{directory}: taking {newest}"
    assert find_adapter(newest, said.append) == newest and not said
    with pytest.raises(UserError, match="none: no such directory: give that of an adapter, a task or a run"):
        find_adapter(tmp_path / "none", said.append)
    checkpoint(tmp_path / "run" / "b", 1)
    with pytest.raises(UserError, match=rf"several tasks: choose one of {tmp_path}/run/a, {tmp_path}/run/b$"):
        find_adapter(tmp_path / "run", said.append)
    # What a run that went back has left is not its newest save.
    (tmp_path / "run" / "manifests").mkdir()
    saved = {"tasks": [{"name": "a", "step": 20, "checkpoint": "a/checkpoint-20"}]}
    (tmp_path / "run" / "manifests" / "manifest-00000001.json").write_text(json.dumps(saved))
    assert find_adapter(tmp_path / "run" / "a", said.append).name == "checkpoint-20"


@pytest.mark.parametrize(
    ("sizes", "count"),
    [((1, 1, 1, None), 1), ((2, 3, 1, None), 6), ((2, 1, 4, 1), 4), ((2, 1, 2, None), 4), ((3, 2, 2, 1), 12)],
)
def test_parallel_sizes_need_processes(sizes: tuple[int, int, int, int | None], count: int) -> None:
    names = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    given = {f"{name}_parallel_size": size for name, size in zip(names, sizes, strict=True)}
    assert launch.processes_needed(Namespace(**given)) == count


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launch.process_count(Namespace(gpus=2, processes=None)) == 2
    with pytest.raises(UserError, match=r"--gpus 4: this machine has 2 .*torchrun"):
        launch.process_count(Namespace(gpus=4, processes=None))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match="use --processes 4"):
        launch.process_count(Namespace(gpus=4, processes=None))


def test_under_a_launcher_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert launch.process_count(Namespace(gpus=4, processes=None), 2) == 4
    with pytest.raises(UserError, match="--processes 2: the launcher has started 4"):
        launch.process_count(Namespace(gpus=None, processes=2))


# In place of `python -m megatron_mux.cli`: does as its first word says.
RANK = """#!{python} -I
import os, signal, sys, time
word, rank = sys.argv[3], os.environ["RANK"]
if word == "status" and rank == "1":
    sys.exit(2)
if word == "kill" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if word in ("stop", "hang up"):
    number = signal.SIGINT if word == "stop" else signal.SIGHUP
    signal.signal(number, lambda number, frame: sys.exit(0))
    open(f"{{__file__}}-takes-{{rank}}", "w").close()
    while rank == "0" and not os.path.exists(f"{{__file__}}-takes-1"):
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getppid(), number)
if word == "wait":
    open(f"{{__file__}}-{{rank}}", "w").write(str(os.getpid()))
time.sleep(0.2 if word == "quick" else 60)
sys.exit(5)
"""


def ranks(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run two ranks that do as `word` says; returns the status."""
    script = tmp_path / "python"
    script.write_text(RANK.format(python=os.environ.get("COLD_PYTHON", sys.executable)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(launch, "_SECONDS_TO_LEAVE", 0.2)
    (tmp_path / "rank-1-warnings.log").touch()
    before, hang_up = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        status = launch.run_processes([word], 2, "megatron-mux train", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, hang_up)
    assert signal.getsignal(signal.SIGINT) == before
    return status


@pytest.mark.parametrize(("word", "status", "said"), [
    ("status", 2, ""),
    ("kill", 137, "megatron-mux train: rank 1 was ended by SIGKILL (was the machine out of memory?)\n"),
    ("stop", 0, ""),
    ("hang up", 0, ""),
    ("quick", 5, ""),
])  # fmt: skip
def test_ranks_end_together_with_the_status_of_the_first_that_failed(
    word: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert ranks(word, tmp_path, monkeypatch) == status
    # If another test has started gRPC in this process, each fork makes it write lines.
    lines = [
        line
        for line in capfd.readouterr().err.splitlines(True)
        if not re.match(r"[IWE]\d{4} .*\.cc:\d+\] ", line)
    ]
    log = f"megatron-mux train: what libraries of rank 1 wrote is in {tmp_path / 'rank-1-warnings.log'}\n"
    assert "".join(lines) == said + (log if word == "kill" else "")


def test_a_launcher_leaves_ignored_hangups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert launch._forwarded() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(RANK.format(python=os.environ.get("COLD_PYTHON", sys.executable)))
    script.chmod(0o755)
    code = f"import sys; from megatron_mux.cli import launch; sys.executable = {str(script)!r}\n"
    code += "launch.run_processes(['wait'], 2, 'megatron-mux train')"
    launcher = subprocess.Popen([os.environ.get("COLD_PYTHON", sys.executable), "-c", code])
    files = [tmp_path / f"python-{rank}" for rank in (0, 1)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_without_save_a_new_directory_is_named_after_the_task_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.new_run_directory(Path("x/tasks.yaml")) == Path("runs/tasks")
    Path("runs/tasks").mkdir(parents=True)
    Path("runs/tasks/lock").touch()
    assert train.new_run_directory(Path("x/tasks.yaml")) == Path("runs/tasks"), "no run has saved there"
    Path("runs/tasks/a").mkdir()
    assert train.new_run_directory(Path("x/tasks.yaml")) == Path("runs/tasks-2")


def test_a_path_is_taken_alone_or_after_its_flag() -> None:
    for words in (["x.yaml"], ["--tasks", "x.yaml"]):
        for around in (["--backbone", ".", *words], [*words, "--backbone", "."]):
            assert plan.build_parser().parse_args(around).tasks == Path("x.yaml")
    with pytest.raises(UserError, match="--tasks"):
        plan.build_parser().parse_args(["--backbone", "."])
    with pytest.raises(UserError, match="not allowed with"):
        plan.build_parser().parse_args(["--backbone", ".", "--tasks", "x.yaml", "y.yaml"])
    runs = [draw.build_parser().parse_args(words).run for words in (["a"], ["--run", "a"], [])]
    assert runs == [Path("a"), Path("a"), None]


def test_the_task_file_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").touch()
    words = ["tasks.yaml", "--mux-tasks", "tasks.yaml", "--backbone", str(tmp_path)]
    with pytest.raises(UserError, match="is the task file already"):
        train.plan_run(words, "megatron-mux train")
    with pytest.raises(UserError, match=r"^no-such\.yaml: "):
        train.plan_run(["no-such.yaml", *words[3:]], "megatron-mux train")
