"""`megatron-mux serve-admin`: tenants and keys of a service, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from megatron_mux.cli.serve_admin import main
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.database.tables import Key


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(sqlite_url(tmp_path))

    def run(*words: str, status: int = 0) -> str:
        assert main(["--state", str(tmp_path), *words]) == status
        said = capsys.readouterr()
        return (said.err if status else said.out).strip()

    first = run("add-tenant", "ann")
    second = run("add-key", "ann", "--days", "90")
    assert "has 2 keys" in run("add-key", "ann", status=2)
    with store.read() as session:
        kept = {key.hash: key.id for key in session.scalars(select(Key))}
    assert kept.keys() == {hash_of(first), hash_of(second)}
    run("revoke-key", kept[hash_of(first)])
    listed = run("list")
    assert "revoked" in listed and "valid until" in listed and "ann" in listed
    assert first not in listed and second not in listed
    run("add-key", "ann")
    assert "no tenant bob" in run("add-key", "bob", status=2)
    assert main(["--state", str(tmp_path / "nowhere"), "list"]) == 2 and not (tmp_path / "nowhere").exists()
    store.close()
