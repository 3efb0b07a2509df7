"""Workers are kept warm, and replaced when they die or take too long."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.serve.checker.checker import Checker, CheckError
from megatron_mux.serve.jobs.fields import Fault

WORKER = """
import json, os, pathlib, sys, time
lives = pathlib.Path("LIVES")
with lives.open("a") as file:
    print(sys.argv[1], os.getpid(), file=file)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    task = request["task"]
    if task["name"] == "dies" or (task["name"] == "dies once" and len(lives.read_text().splitlines()) < 3):
        os._exit(9)
    if task["name"] == "hangs":
        time.sleep(60)
    if task["name"] == "breaks":
        found = {"failed": True}
    elif request["do"] == "fields":
        found = {"faults": [["adapter.r: " + request["backbone"], "adapter.r", "invalid_value"]]}
    else:
        found = {"faults": [], "total_steps": 3, "records": 4, "tokens": 5, "notes": ["cut"]}
    print(json.dumps(found), flush=True)
"""


def in_a_loop(test: Callable[[Path], Coroutine[None, None, None]]) -> Callable[[Path], None]:
    """A test that pytest can call."""

    @wraps(test)
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


def lives(tmp_path: Path) -> list[str]:
    """The processes that were started, each with its kind of work."""
    path = tmp_path / "lives"
    return path.read_text().splitlines() if path.exists() else []


@asynccontextmanager
async def checking(tmp_path: Path, command: Sequence[str] = (sys.executable, "-S")) -> AsyncIterator[Checker]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("LIVES", str(tmp_path / "lives")))
    checker = Checker(tmp_path, command=[*command, str(script)])
    await checker.start()
    try:
        yield checker
    finally:
        await checker.close()


def task(name: str) -> dict[str, Any]:
    return {"name": name, "data": {"path": "/none"}}


@in_a_loop
async def test_answers_come_from_warm_processes(tmp_path: Path) -> None:
    async with checking(tmp_path) as checker:
        for _ in range(3):
            faults = await checker.check_fields(Path("/tiny"), task("a"))
            assert faults == [Fault("adapter.r: /tiny", "adapter.r", "invalid_value")]
        checked = await checker.check_files(Path("/tiny"), task("a"))
        assert (checked.total_steps, checked.records, checked.tokens) == (3, 4, 5)
        assert (checked.notes, checked.faults) == (["cut"], [])
        assert sorted(life.split()[0] for life in lives(tmp_path)) == ["fields", "files"]


@in_a_loop
async def test_a_process_that_dies_is_replaced_and_its_request_tried_again(tmp_path: Path) -> None:
    async with checking(tmp_path) as checker:
        await checker.check_fields(Path("/tiny"), task("a"))
        checked = await checker.check_files(Path("/tiny"), task("dies once"))
        assert checked.total_steps == 3
        checked = await checker.check_files(Path("/tiny"), task("dies"))
        (fault,) = checked.faults
        assert fault.param == "training_file"
        assert fault.code == "invalid_training_file"
        assert "ended without an answer" in fault.message
        assert (await checker.check_files(Path("/tiny"), task("a"))).total_steps == 3


@in_a_loop
async def test_a_check_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with checking(tmp_path) as checker:
        await checker.check_fields(Path("/tiny"), task("a"))  # the process has started
        checker._seconds = 0.01
        assert "took more than" in (await checker.check_fields(Path("/tiny"), task("hangs")))[0].message
        assert "took more than" in (await checker.check_files(Path("/tiny"), task("hangs"))).faults[0].message
        checker._seconds = 30.0
        assert (await checker.check_files(Path("/tiny"), task("a"))).total_steps == 3
    kinds = [life.split()[0] for life in lives(tmp_path)]
    assert kinds.count("files") == 2  # what takes too long is not tried again beside others that wait


@in_a_loop
async def test_checks_that_are_given_up_do_not_answer_later_ones(tmp_path: Path) -> None:
    async with checking(tmp_path) as checker:
        await checker.check_fields(Path("/tiny"), task("a"))
        hanging = asyncio.create_task(checker.check_fields(Path("/tiny"), task("hangs")))
        await asyncio.sleep(0.05)
        hanging.cancel()
        faults = await checker.check_fields(Path("/other"), task("a"))
        assert faults[0].message == "adapter.r: /other"


@in_a_loop
async def test_a_check_that_breaks_down_raises(tmp_path: Path) -> None:
    async with checking(tmp_path) as checker:
        with pytest.raises(CheckError, match=r"breaks: checking its fields failed: see .*checker\.log"):
            await checker.check_fields(Path("/tiny"), task("breaks"))
        assert await checker.check_fields(Path("/tiny"), task("a"))


@in_a_loop
async def test_without_a_process_checks_raise(tmp_path: Path) -> None:
    async with checking(tmp_path, command=["/bin/false"]) as checker:
        with pytest.raises(CheckError, match="does not start"):
            await checker.check_fields(Path("/tiny"), task("a"))
