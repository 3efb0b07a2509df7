"""The client's command line tells mistakes in one line, before anything is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_mux.split.certificates import write_certificates
from megatron_mux.split.client import __main__ as client
from tests.unit.split.splitting import task_of


def words_of(whole_backbone: Path, data: Path, tmp_path: Path) -> dict[str, str]:
    tasks = [task_of(data, name) for name in ("one", "two")]
    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    write_certificates(tmp_path, [], ["me"], days=1, replace=False)
    return {
        "--backbone": str(whole_backbone),
        "--tasks": str(tmp_path / "tasks.yaml"),
        "--task": "one",
        "--server": "localhost:1",
        "--tls-ca": str(tmp_path / "ca.pem"),
        "--tls-cert": str(tmp_path / "me.pem"),
        "--tls-key": str(tmp_path / "me.key"),
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--task": "three"}, "--task three: .*tasks.yaml has one, two"),
        ({"--task": None}, "has 2 tasks, and a client trains one: add --task NAME"),
        (
            {"--tls-key": None},
            "--tls-dir DIR --client NAME, or --tls-ca, --tls-cert and --tls-key, must be given",
        ),
        ({"--tls-key": None, "--tls-dir": "tls"}, "--tls-dir DIR --client NAME, or"),
        ({"--tls-key": None, "--tls-dir": "tls", "--client": "me"}, "--tls-key tls/me.key: no such file"),
        ({"--tls-key": "gone.key"}, "--tls-key gone.key: no such file: .*certificates makes it"),
        ({"--cut-front": "0"}, "--cut-front 0: whoever sees embeddings knows every token"),
        ({"--cut-front": "3"}, "--cut-front 3 and --cut-back 1 leave no layer of 4 for the server"),
        ({"--server": "localhost"}, "localhost: must be HOST:PORT"),
        ({"--wire": "f8"}, "--wire: invalid choice: 'f8'"),
        ({"--backbone": "nowhere"}, "nowhere is not a directory"),
    ],
)
def test_mistakes_are_told_in_one_line(
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    said: str,
) -> None:
    words = words_of(whole_backbone, data, tmp_path) | {"--save": str(tmp_path / "run")} | changes
    assert (
        client.main([word for flag, value in words.items() if value is not None for word in (flag, value)])
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron_mux.split.client: ") and re.search(said, line), line
    assert not (tmp_path / "run").exists()
