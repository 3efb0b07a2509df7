"""Real clients and a real server: results are those of a run on one machine, whoever is killed meanwhile."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.forked import Server
from tests.end_to_end.harness import assert_close, assert_same, relative
from tests.end_to_end.split_deployment import (
    CLIENTS,
    SECONDS,
    STEPS,
    Deployment,
    adapter,
    deployed,
    furnish_split,
    losses,
    train_under_fire,
)
from tests.end_to_end.workplace import Workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return furnish_split(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def local(place: Workplace, server: Server) -> Path:
    """The same tasks on one machine."""
    run = server.run(place.arguments("--mux-policy", "spatial", "--save", place.root / "local"))
    assert run.status == 0, run.errors
    return place.root / "local"


@pytest.fixture(scope="module")
def together(place: Workplace, server: Server) -> Path:
    """All clients at once, whose requests are computed together where that is faster."""
    with deployed(place, server, "--save", "server-1") as own:
        own.train(list(CLIENTS), place.root / "together")
        assert own.kill(signal.SIGTERM) == 0
    return place.root / "together"


@pytest.fixture(scope="module")
def alone(place: Workplace, server: Server) -> Path:
    """All clients at once, whose requests are computed one by one."""
    with deployed(place, server, "--save", "server-2", "--no-co-batching") as own:
        own.train(list(CLIENTS), place.root / "alone")
    return place.root / "alone"


def test_clients_learn_what_a_run_on_one_machine_learns(
    place: Workplace, local: Path, together: Path
) -> None:
    for name in CLIENTS:
        ours, theirs = losses(together, name), losses(local, name)
        found, wanted = adapter(together, name), adapter(local, name)
        apart = max(abs(one / other - 1) for one, other in zip(ours, theirs, strict=True))
        far = max(relative(found[key], value) for key, value in wanted.items())
        print(
            f"{name}: losses differ by {apart:.0e}, tensors by {far:.0e}"
        )  # with -s: the table of docs/split.md
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert_close(found, wanted, 2e-3, name)
        assert all(value.any() for value in found.values()), "all of it was trained"


@pytest.mark.parametrize("name", ["paper", "wide", "prefix"])
def test_peft_loads_what_clients_save(place: Workplace, together: Path, name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    loaded = PeftModel.from_pretrained(model, str(together / name / f"checkpoint-{STEPS}"))
    found = [
        value for key, value in loaded.state_dict().items() if "lora_B" in key or "prompt_encoder" in key
    ]
    assert found and all(value.any() for value in found)


def test_half_precision_on_the_wire_changes_little(place: Workplace, server: Server, local: Path) -> None:
    with deployed(place, server, "--save", "server-5", "--no-co-batching") as own:
        own.train(["paper"], place.root / "bf16", "--wire", "bf16")
    difference = losses(place.root / "bf16", "paper")[-1] - losses(local, "paper")[-1]
    print(f"bf16 on the wire: perplexity differs by {math.expm1(difference):.2%}")
    assert abs(math.expm1(difference)) <= 0.01


def test_noise_is_told_and_its_secret_stays_with_the_client(place: Workplace, server: Server) -> None:
    noise = "--clip-activations 30 --clip-gradients 1 --noise-multiplier 0.1 --delta 1e-3".split()
    with deployed(place, server, "--save", "server-6", "--no-co-batching") as own:
        process = own.client("paper", place.root / "noisy", *noise)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and "epsilon" in output, output
        secret = place.root / "noisy/paper/noise.secret"
        assert secret.stat().st_size == 32 and secret.stat().st_mode & 0o077 == 0


def test_kills_leave_no_trace(place: Workplace, server: Server, alone: Path) -> None:
    """Server and client are killed at random moments; the adapter comes out the same to the bit."""
    save = place.root / "killed"
    with deployed(place, server, "--save", "server-3", "--no-co-batching") as own:
        assert train_under_fire(own, ["wide"], save, kills=5, seed=1, most_seconds=1.5)
    assert losses(save, "wide") == losses(alone, "wide")
    assert_same(adapter(save, "wide"), adapter(alone, "wide"), "wide")


@pytest.mark.parametrize(
    ("more", "identity", "said"),
    [
        ((), "mallory", "certificate"),
        (("--tls-cert", "nowhere.pem"), "alice", "--tls-cert nowhere.pem: no such file"),
        (("--cut-front", "0"), "alice", "--cut-front 0"),
        (("--cut-front", "5", "--cut-back", "3"), "alice", "leave no layer"),
        (("--task", "nobody"), "alice", "--task nobody"),
        (("--tls-ca", "other/ca.pem"), "alice", "certificate"),
        (("--backbone", "shallow"), "alice", "backbone"),
    ],
)
def test_mistakes_are_told_in_a_line(
    place: Workplace, server: Server, refusing: Deployment, more: tuple[str, ...], identity: str, said: str
) -> None:
    process = refusing.client("paper", place.root / "refused", *more, identity=identity)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, output
    assert said in output and "Traceback" not in output
    assert not (place.root / "refused" / "paper" / "metrics.jsonl").exists()


def test_a_directory_holds_the_adapter_of_one_client(
    place: Workplace, together: Path, alone: Path, refusing: Deployment
) -> None:
    """Alice's is finished; then she and bob start at once in another directory."""
    before = {file: file.read_bytes() for file in together.rglob("*") if file.is_file()}
    for more in ((), ("--load", str(together)), ("--break-lock",)):
        process = refusing.client("paper", together, *more, identity="bob")
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 2 and "is of the client alice, and this client is bob" in output, output
    assert {file: file.read_bytes() for file in together.rglob("*") if file.is_file()} == before
    save = place.root / "contested"
    started = [refusing.client("wide", save, identity=name) for name in ("alice", "bob")]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2], outputs
    (refused,) = [output for process, output in zip(started, outputs, strict=True) if process.returncode]
    assert "is being written by process" in refused or "is of the client" in refused
    assert losses(save, "wide") == losses(alone, "wide")
    assert_same(adapter(save, "wide"), adapter(alone, "wide"), "wide")


@pytest.fixture(scope="module")
def refusing(place: Workplace, server: Server) -> Iterator[Deployment]:
    with deployed(place, server, "--save", "server-4", "--no-co-batching") as own:
        yield own
