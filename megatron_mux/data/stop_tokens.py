"""The tokens with which a completion ends: end-of-sequence, the chat template's end of turn, the backbone's own."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

_ANSWER = "an-answer"


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that end a completion.

    They are the tokenizer's end-of-sequence, the special token with which its chat template closes an assistant's turn,
    and those of `generation_config.json` beside the tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer.
    """
    found = {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        with suppress(Exception):  # a chat template is a program: it may fail in any way
            found |= _end_of_turn(tokenizer)
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads((Path(tokenizer.name_or_path) / "generation_config.json").read_text())
        given = content.get("eos_token_id")
        found |= {token for token in (given if isinstance(given, list) else [given]) if type(token) is int}
    return frozenset(found)


def _end_of_turn(tokenizer: Any) -> set[int]:
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    after: list[int] = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= set(tokenizer.all_special_ids)
    return {token for token in after[:2] if token in special}
