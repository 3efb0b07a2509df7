"""The process that knows torch: a request a line on standard input, its answer a line on standard output, in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.memory.tensors import Skeleton, one_line
from megatron_mux.memory.trace.case import Case


def _trace(**case: Any) -> str:
    """The stream of a case."""
    from megatron_mux.memory.trace.training import trace

    return trace(Case.from_dict(case)).to_json()


def _sizes(config: str) -> str:
    """A model's sizes."""
    return _skeleton(config).tensors.to_json()


ANSWERS: Mapping[str, Callable[..., Any]] = {"trace": _trace, "sizes": _sizes}
"""What can be asked."""


def _skeleton(config: str) -> Skeleton:
    """A model, built once for all that is asked about it."""
    file = Path(config)
    try:
        return _built(file, file.read_bytes())
    except OSError:
        return Skeleton(file)  # says what is wrong


@lru_cache(maxsize=1)
def _built(file: Path, _: bytes) -> Skeleton:
    return Skeleton(file)


def main() -> int:
    """Answer until the input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What every request needs is imported before the first one is there.
    import transformers.modeling_utils  # noqa: F401

    from megatron_mux.memory.fake_gpu.guard import NoFakeGpu
    from megatron_mux.memory.trace.model import UntraceableError

    for line in sys.stdin:
        what, about = json.loads(line)
        try:
            said = {"answer": ANSWERS[what](**about)}
        except UserError as error:
            said = {"refused": error.problems}
        except (NoFakeGpu, UntraceableError) as error:
            said = {"failed": str(error)}
        except Exception as error:  # models raise whatever they do without values
            said = {"failed": f"{type(error).__name__}: {one_line(error)}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
