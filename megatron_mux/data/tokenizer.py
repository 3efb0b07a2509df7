"""Loading the backbone's tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.errors import UserError

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
        backbone: The directory.

    Returns:
        The tokenizer.

    Raises:
        UserError: There is none, it cannot be read, or it has no end-of-sequence token.
    """
    directory = Path(backbone)
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
