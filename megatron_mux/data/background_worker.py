"""The process behind `BackgroundTokenising`: one request as its argument, lines of JSON as its output.

A line holds a text for people, or, last, each file's tokens or problems. Standard input ends when the process that
waits for the results ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_mux.data.tokenised_file import Progress, progress_lines, tokenise_file
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.errors import UserError


def main(request: dict[str, Any]) -> None:
    """Tokenise what a request names.

    Args:
        request: The arguments of `BackgroundTokenising`.
    """
    os.nice(request["niceness"])
    cache = None if request["cache"] is None else Path(request["cache"])
    tokenizer = load_tokenizer(request["backbone"])
    results: dict[str, Any] = {}
    for path in dict.fromkeys(request["paths"]):
        progress = _while_awaited(progress_lines(Path(path), _write))
        try:
            results[path] = asdict(tokenise_file(Path(path), tokenizer, cache, progress))
        except UserError as error:
            results[path] = error.problems
    _write(results)


def _while_awaited(progress: Progress) -> Progress:
    """The same, but leave when nobody waits for the results any more."""

    def tell(done: int, size: int, records: int) -> None:
        if select.select([sys.stdin], [], [], 0)[0]:
            sys.exit(1)
        progress(done, size, records)

    return tell


def _write(line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
