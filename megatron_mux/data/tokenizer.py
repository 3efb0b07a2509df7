"""The backbone's tokenizer: loading it, and telling it from others."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError
from megatron_mux.hub_cache import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "merges.txt",
)


def load_tokenizer(backbone: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer in a Hugging Face directory; nothing is downloaded and no code of the directory is run.

    Args:
        backbone: The directory, or the name of a model in the Hugging Face cache.

    Returns:
        The tokenizer.

    Raises:
        UserError: There is none, it cannot be read, or it has no end-of-sequence token.
    """
    directory = find_model(backbone)
    if not os.path.isdir(directory):
        raise UserError(f"{directory}: no such directory")
    if not any((directory / name).is_file() for name in _FILES):
        raise UserError(
            f"{directory}: holds no tokenizer (tokenizer.json): put the backbone's tokenizer beside it"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever is in the files may fail in any way
        raise UserError(
            f"{directory}: its tokenizer cannot be loaded: {' '.join(str(error).split())}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{directory}: its tokenizer has no end-of-sequence token: set eos_token in tokenizer_config.json"
        )
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identifies what a tokenizer makes of records: SHA-256 of its content, its chat template and its libraries."""
    import tokenizers
    import transformers

    template = str(tokenizer.chat_template)
    about = {
        "content": _content(tokenizer),
        "class": type(tokenizer).__name__,
        "template": template,
        "day": str(date.today()) if "strftime_now" in template else "",  # such a chat template writes the day
        "end": tokenizer.eos_token_id,
        "special": [str(token) for token in tokenizer.all_special_tokens],
        "split_special": bool(getattr(tokenizer, "split_special_tokens", False)),
        "libraries": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=4)
def _content(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary and of the rules that go with it."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules.update(truncation=None, padding=None)  # the state of the last call
        return hashlib.sha256(json.dumps(rules).encode()).hexdigest()
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for file in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
