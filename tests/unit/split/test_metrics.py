"""The server's log says what happened to whom, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from megatron_mux.split.server.metrics import make_logger


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger("megatron_mux.split")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_have_their_fields(form: str, restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    log = make_logger(form)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("refused", extra={"fields": {"client": "alice", "rows": 3}})
    said = capsys.readouterr().err
    first = said.splitlines()[0]
    if form == "json":
        assert json.loads(first).items() >= {"event": "refused", "client": "alice", "rows": 3}.items()
    else:
        assert first.endswith('ERROR refused client="alice" rows=3')
    assert "ValueError: broken" in said
