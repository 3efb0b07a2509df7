"""What a backbone is given to continue a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mux.errors import UserError


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], plain: bool = False) -> list[int]:
    """The tokens of a conversation up to the answer that is to come.

    Args:
        tokenizer: A Hugging Face tokenizer. Without a chat template, texts follow each other as they are, and a line
            ends after each of the assistant's.
        messages: `role` and `content` of each.
        plain: Do without the chat template.

    Raises:
        UserError: The chat template does not take the conversation, or it has no token.
    """
    if tokenizer.chat_template and not plain:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a chat template is a program: it may fail in any way
            raise UserError(
                f"the tokenizer's chat template does not take this conversation ({error})"
            ) from error
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ends = {"assistant": "\n"}
        text = "".join(message["content"] + ends.get(message["role"], "") for message in messages)
        tokens = tokenizer(text)["input_ids"]
        while len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id:  # which some tokenizers append
            tokens = tokens[:-1]
    if not tokens:
        raise UserError("there is nothing to continue: the text has no token")
    return tokens
