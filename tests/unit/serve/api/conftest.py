from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serve.api.world import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path, file_bytes=300_000, stored_bytes=700_000, files=6, open_jobs=5)
    with made.http:
        yield made
    made.service.store.close()
