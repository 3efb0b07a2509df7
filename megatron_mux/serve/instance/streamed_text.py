"""A completion's text as it grows, token by token, up to a text that stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_UNFINISHED = "\ufffd"
"""What tokenizers decode the first bytes of a character to."""


@dataclass
class StreamedText:
    """The text of a completion.

    Attributes:
        tokenizer: A Hugging Face tokenizer.
        stop: Texts that end it, and are no part of it.
        tokens: Its tokens so far.
        is_stopped: Whether one of `stop` has come.
    """

    tokenizer: Any
    stop: Sequence[str] = ()
    tokens: list[int] = field(default_factory=list)
    is_stopped: bool = False
    _known: int = 0  # tokens whose text is in `_text`
    _context: int = 0  # the first of the tokens before these that decide how the next ones begin
    _text: str = ""
    _sent: int = 0  # characters of `_text`

    def add(self, token: int) -> str:
        """Append a token; returns the text that is certain by now and has not been returned."""
        self.tokens.append(token)
        before, after = self._decode(self._context, self._known), self._decode(self._context, None)
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._text += after[len(before) :]
            self._context, self._known = self._known, len(self.tokens)
        return self._certain(ends=False)

    def end(self) -> str:
        """The rest, as no token follows."""
        if not self.is_stopped:
            before = self._decode(self._context, self._known)
            self._text += self._decode(self._context, None)[len(before) :]
        return self._certain(ends=True)

    def _decode(self, start: int, stop: int | None) -> str:
        return str(self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True))

    def _certain(self, ends: bool) -> str:
        found = [at for word in self.stop if (at := self._text.find(word, self._sent)) >= 0]
        if found:
            self._text, self.is_stopped = self._text[: min(found)], True
        until = len(self._text) - (0 if ends or self.is_stopped else self._open_end())
        new, self._sent = self._text[self._sent : until], max(until, self._sent)
        return new

    def _open_end(self) -> int:
        """Characters at the end that may be the beginning of a text that stops it."""
        unsent = self._text[self._sent :]
        sizes = [
            size
            for word in self.stop
            for size in range(1, min(len(word), len(unsent) + 1))
            if unsent.endswith(word[:size])
        ]
        return max(sizes, default=0)
