"""Train many parameter-efficient fine-tuning tasks at once on one frozen Megatron-Core backbone.

`train` runs tasks from Python, and `read_run` reads what a run has saved. Packages, from the lowest layer up:
`runtime`, `kernels` and `batch`; `backbone`, `adapters` and `data`; `tasks` and `pipeline`; `fusion`; `engine`;
`training`, `checkpoint`, `report` and `arguments`; `split`; `cli` and `api`. Each imports only those below it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_mux.version import __version__

if TYPE_CHECKING:
    from megatron_mux.api import TaskResult, read_run, train
    from megatron_mux.errors import UserError

__all__ = ["TaskResult", "UserError", "__version__", "read_run", "train"]

_MODULES = {
    "TaskResult": "megatron_mux.api",
    "UserError": "megatron_mux.errors",
    "read_run": "megatron_mux.api",
    "train": "megatron_mux.api",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for: importing the package stays cheap."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
