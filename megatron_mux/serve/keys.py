"""Tenants and their keys."""

from __future__ import annotations

import secrets
import time

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from megatron_mux.errors import UserError
from megatron_mux.files import write_atomically
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.database.tables import Key, Tenant
from megatron_mux.serve.settings import Settings

_PREFIX = "sk-mux-"
_MOST_LIVE = 2
"""Keys of a tenant at the same time: the one in use, and the one that replaces it."""


def new_tenant(store: Store, name: str) -> str:
    """Add a tenant and return its id.

    Raises:
        UserError: The name is taken, empty, or longer than 128 characters.
    """
    if not 0 < len(name) <= 128 or not name.isprintable():
        raise UserError("the name of a tenant has 1 to 128 printable characters")
    with store.write() as session:
        if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
            raise UserError(f"there is a tenant {name} already")
        return _add_tenant(session, name)


def tenant_id(store: Store, name: str) -> str:
    """The id of a tenant.

    Raises:
        UserError: There is none of that name.
    """
    with store.read() as session:
        found = session.scalar(select(Tenant.id).where(Tenant.name == name))
    if found is None:
        raise UserError(f"there is no tenant {name}")
    return found


def new_key(store: Store, tenant_id: str, lifetime: float | None = None) -> str:
    """Make a key of a tenant. It is returned here and never again: the database has its hash only.

    Args:
        store: The database.
        tenant_id: Whose key.
        lifetime: Seconds until it expires; None: never.

    Raises:
        UserError: There is no such tenant, or it has two keys that are neither revoked nor expired.
    """
    with store.write() as session:
        if session.get(Tenant, tenant_id) is None:
            raise UserError(f"there is no tenant {tenant_id}")
        live = select(Key.id).where(
            Key.tenant_id == tenant_id,
            Key.revoked_at.is_(None),
            or_(Key.expires_at.is_(None), Key.expires_at > time.time()),
        )
        if len(session.scalars(live).all()) >= _MOST_LIVE:
            raise UserError(f"tenant {tenant_id} has {_MOST_LIVE} keys: revoke one of them first")
        key = _random_key()
        _add_key(session, tenant_id, key, lifetime)
    return key


def revoke_key(store: Store, key_id: str) -> None:
    """Have a key refused from now on.

    Raises:
        UserError: There is no such key.
    """
    with store.write() as session:
        key = session.get(Key, key_id)
        if key is None:
            raise UserError(f"there is no key {key_id}")
        key.revoked_at = key.revoked_at or time.time()


def first_key(settings: Settings, store: Store) -> None:
    """Give a new service a tenant `default` whose key is in the file `first-key` of the service's directory.

    The file comes first: a server that is killed in between finds the key there and adds it to the database.

    Raises:
        OSError: The file cannot be written.
    """
    with store.read() as session:
        if session.scalar(select(Tenant.id).limit(1)) is not None:
            return
    path = settings.state / "first-key"
    if not path.exists():
        write_atomically(path, _random_key() + "\n", mode=0o600)
    with store.write() as session:
        _add_key(session, _add_tenant(session, "default"), path.read_text().strip(), None)


def _random_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def _add_tenant(session: Session, name: str) -> str:
    tenant = Tenant(id=f"org-{secrets.token_hex(12)}", name=name, created_at=time.time())
    session.add(tenant)
    session.flush()
    return tenant.id


def _add_key(session: Session, tenant_id: str, key: str, lifetime: float | None) -> None:
    now = time.time()
    expires = None if lifetime is None else now + lifetime
    session.add(
        Key(
            id=f"key-{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            hash=hash_of(key),
            created_at=now,
            expires_at=expires,
        )
    )
