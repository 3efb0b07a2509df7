"""`megatron-mux serve-admin`: tenants and keys of a service, and its backups, from the command line."""

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


def test_a_service_is_backed_up_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, kept, new = (str(tmp_path / name) for name in ("state", "kept", "new"))
    (tmp_path / "state").mkdir()
    store = Store(sqlite_url(tmp_path / "state"))
    assert main(["--state", state, "add-tenant", "ann"]) == 0
    assert main(["backup", "--state", state, "--to", kept]) == 0
    said = capsys.readouterr()
    assert f"{kept}: 0 jobs, 0 files" in said.out and "snapshot 1" in said.err
    assert main(["--state", new, "restore", "--from", kept]) == 0
    assert f"{new}: 0 jobs, 0 files" in capsys.readouterr().out
    assert main(["list", "--state", new]) == 0 and "ann" in capsys.readouterr().out
    store.close()

    def refused(*words: str) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    assert "exists already" in refused("restore", "--from", kept, "--state", new)
    assert "exists already" in refused("backup", "--to", kept, "--state", state)
    assert "no service has begun there" in refused("backup", "--to", f"{kept}2", "--state", f"{new}2")
    assert "is no backup" in refused("restore", "--from", new, "--state", f"{new}2")
    assert "--state DIR is missing" in refused("restore", "--from", kept)
    postgres = ("--state", state, "--database", "postgresql://ann:secret@host/mux")
    said_of_it = refused(*postgres, "backup", "--to", f"{kept}2")
    assert "back it up with its own tools" in said_of_it and "secret" not in said_of_it
    assert "leave it out" in refused(*postgres, "restore", "--from", kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new", "state"]
