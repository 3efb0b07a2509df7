"""Train many parameter-efficient fine-tuning tasks at once on one frozen Megatron-Core backbone.

`train` runs tasks from Python, and `read_run` reads what a run has saved. The rooms, from the ground up: `tasks`,
`runtime`, `kernels` and `layout`; `backbone`, `adapters` and `data`; `pipeline`; `fusion`; `engine`; `training`,
`checkpoint`, `report` and `arguments`; `split`; `cli` and `api`. A room imports only rooms below it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.api import TaskResult, read_run, train
    from megatron_mux.errors import UserError

__version__ = "0.1.0"
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
