"""What a server's flags ask of the scheduler."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_mux.split.run_server import _scheduler_options
from megatron_mux.split.server import build_parser


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
