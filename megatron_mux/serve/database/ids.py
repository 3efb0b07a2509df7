"""Names of what clients are given."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    """A name that nobody can guess: `kind-` and 24 letters and digits."""
    return f"{kind}-{secrets.token_hex(12)}"
