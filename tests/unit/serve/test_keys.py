from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from megatron_mux.errors import UserError
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.database.tables import Key, Tenant
from megatron_mux.serve.keys import first_key, new_key, new_tenant, revoke_key
from megatron_mux.serve.settings import Settings


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(sqlite_url(tmp_path))


def keys(store: Store) -> list[Key]:
    with store.read() as session:
        return list(session.scalars(select(Key)))


def test_the_database_has_no_key_but_its_hash(store: Store) -> None:
    key = new_key(store, new_tenant(store, "ann"), 60)
    (row,) = keys(store)
    assert key.startswith("sk-mux-") and len(key) > 45 and row.hash == hash_of(key) != key
    assert row.expires_at is not None and abs(row.expires_at - row.created_at - 60) < 1


def test_a_tenant_has_two_live_keys_at_most(store: Store) -> None:
    tenant = new_tenant(store, "ann")
    new_key(store, tenant, -1)  # has expired
    new_key(store, tenant)
    new_key(store, tenant)
    with pytest.raises(UserError, match="has 2 keys: revoke one"):
        new_key(store, tenant)
    revoke_key(store, keys(store)[1].id)
    new_key(store, tenant)


def test_wrong_names_are_refused(store: Store) -> None:
    new_tenant(store, "ann")
    for name in ("ann", "", "a" * 129, "a\nb"):
        with pytest.raises(UserError):
            new_tenant(store, name)
    for call in (lambda: new_key(store, "org-1"), lambda: revoke_key(store, "key-1")):
        with pytest.raises(UserError):
            call()


def test_the_first_key_is_made_once(store: Store, tmp_path: Path) -> None:
    settings = Settings(tmp_path, {})
    path = tmp_path / "first-key"
    first_key(settings, store)
    made = path.read_text().strip()
    first_key(settings, store)
    assert path.read_text().strip() == made and path.stat().st_mode & 0o777 == 0o600
    assert [row.hash for row in keys(store)] == [hash_of(made)]
    path.unlink()
    first_key(settings, store)
    assert not path.exists()


def test_a_first_key_whose_server_was_killed_is_taken_over(store: Store, tmp_path: Path) -> None:
    (tmp_path / "first-key").write_text("sk-mux-from-before\n")
    first_key(Settings(tmp_path, {}), store)
    with store.read() as session:
        assert [tenant.name for tenant in session.scalars(select(Tenant))] == ["default"]
    assert [row.hash for row in keys(store)] == [hash_of("sk-mux-from-before")]
