"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

from megatron_mux.memory import worker
from tests import warm

sys.executable = os.environ.get(warm.COLD, sys.executable)

# An example may take long on a busy machine, where tests of several processes share two cores. What thirty examples do
# not find, a hundred hardly do: properties that need more say so.
settings.register_profile("any-machine", settings(), deadline=None, max_examples=30)
settings.load_profile("any-machine")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep tokens, profiles and the like in a directory of their own, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_MUX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_calls() -> Iterator[None]:
    """Processes for traces and dry runs start with what they import, if `run.py` started these tests."""
    with pytest.MonkeyPatch.context() as patch:
        if warm.VARIABLE in os.environ:
            patch.setattr(worker, "sys", SimpleNamespace(executable=os.environ[warm.VARIABLE]))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_process_stays() -> Iterator[None]:
    """The process for dry runs, which a run keeps ready, ends with the tests; importing what it needs takes seconds."""
    yield
    process = sys.modules.get("megatron_mux.dry_run.process")
    if process is not None:
        process.end_worker()
