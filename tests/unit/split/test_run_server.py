"""What a server's flags ask of the scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_mux.errors import UserError
from megatron_mux.split.server.__main__ import build_parser, check_files
from megatron_mux.split.server.run import _run, _scheduler_options
from tests import tiny_models


def test_requests_are_in_the_order_of_arrival_unless_clients_have_shares(tmp_path: Path) -> None:
    flags = [
        "--backbone",
        "b",
        "--listen",
        "localhost:1",
        "--tls-cert",
        "c",
        "--tls-key",
        "k",
        "--client-ca",
        "a",
    ]
    assert _scheduler_options(build_parser().parse_args(flags)).weights is None
    (tmp_path / "shares.json").write_text(json.dumps({"alice": 2}))
    more = [*flags, "--weights", str(tmp_path / "shares.json")]
    assert _scheduler_options(build_parser().parse_args(more)).weights == {"alice": 2.0}


def test_a_directory_of_certificates_stands_for_their_files(tmp_path: Path) -> None:
    words = ["--backbone", "b", "--listen", "localhost:1"]
    with pytest.raises(UserError, match="--tls-cert: is missing: give --tls-dir DIR"):
        check_files(build_parser().parse_args(words))
    words += ["--tls-dir", str(tmp_path)]
    with pytest.raises(UserError, match=r"server.pem: no such file: .*split-certificates` makes them"):
        check_files(build_parser().parse_args(words))
    for name in ("server.pem", "server.key", "ca.pem", "mine.pem"):
        (tmp_path / name).touch()
    arguments = build_parser().parse_args([*words, "--tls-cert", str(tmp_path / "mine.pem")])
    check_files(arguments)
    files = arguments.tls_cert, arguments.tls_key, arguments.client_ca
    assert [file.name for file in files] == ["mine.pem", "server.key", "ca.pem"]


def test_clients_leave_the_server_a_layer(tmp_path: Path) -> None:
    words = [
        "--backbone",
        str(tiny_models.make(tmp_path, "llama", num_hidden_layers=4)),
        "--listen",
        "localhost:1",
    ]
    words += ["--tensor-model-parallel-size", "3", "--least-cut-back", "1", "--least-cut-front"]
    with pytest.raises(UserError, match="--least-cut-front 3 and --least-cut-back 1 leave no layer of 4"):
        _run(build_parser().parse_args([*words, "3"]), "split_server.py")
    with pytest.raises(UserError, match="3"):  # the next mistake
        _run(build_parser().parse_args([*words, "2"]), "split_server.py")
