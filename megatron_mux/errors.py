"""The one exception for mistakes that a user can make and mend."""

from __future__ import annotations


class UserError(Exception):
    """Something in the user's input is wrong: said in words that tell what to change.

    Entry points catch it, print `problems` (one per line) to standard error and exit with status 2.

    Args:
        problems: One or more complete sentences, each naming what is wrong, where, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: list[str] = list(problems)
