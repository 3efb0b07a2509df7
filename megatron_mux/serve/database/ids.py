"""Names of what clients are given, and what is kept of their secrets."""

from __future__ import annotations

import hashlib
import secrets


def new_id(kind: str) -> str:
    """A name that nobody can guess: `kind-` and 24 letters and digits."""
    return f"{kind}-{secrets.token_hex(12)}"


def hash_of(secret: str) -> str:
    """The form in which a key or token is kept. They are random, so that neither salt nor stretching is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()
