from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select

from megatron_mux.serve.database.tables import Checkpoint, Event, Job, Key, StoredFile
from megatron_mux.serve.keys import new_key, new_tenant, revoke_key
from tests.unit.serve.api.world import CHAT, World, upload


def routes(router: Any) -> Iterator[tuple[str, str]]:
    """All routes of an app, those of routers within included."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            # `/v1` is in the paths of the router that has it as its prefix.
            yield from routes(inner)
        elif isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods or ())


def with_prefix(world: World) -> list[tuple[str, str]]:
    found = [
        (method, path if path == "/healthz" else f"/v1{path}") for method, path in routes(world.http.app)
    ]
    assert len(found) == 22
    return found


def everything(world: World) -> str:
    """What the service keeps for tenants."""
    with world.service.store.read() as session:
        rows = [
            row for table in (StoredFile, Job, Event, Checkpoint) for row in session.scalars(select(table))
        ]
    shown = [{key: value for key, value in vars(row).items() if key[0] != "_"} for row in rows]
    state = world.service.settings.state
    paths = sorted(str(path) for place in ("files", "uploads") for path in (state / place).rglob("*"))
    return json.dumps([shown, paths])


def test_no_tenant_sees_or_changes_anything_of_another(world: World) -> None:
    ann = world.client("ann")
    file = upload(ann, name="secret.jsonl")
    job = ann.fine_tuning.jobs.create(
        model="tiny", training_file=file, suffix="secret", metadata={"k": "secret"}
    )
    world.until(lambda: ann.fine_tuning.jobs.retrieve(job.id).status == "queued")
    model = "ft:tiny:ann:secret:1"
    pending = ann.uploads.create(bytes=9, filename="secret", mime_type="", purpose="fine-tune").id
    part = ann.uploads.parts.create(pending, data=b"secret")
    with world.service.store.write() as session:
        row = session.scalars(select(Job)).one()
        row.model, row.status = model, "succeeded"
        session.add(Checkpoint(id="ftckpt-1", job_id=job.id, created_at=1, step=1, path="x"))
    before, headers = everything(world), {"authorization": f"Bearer {world.key('bob')}"}
    ids = {"file_id": file, "job_id": job.id, "upload_id": pending, "model:path": model}
    for method, path in with_prefix(world):
        named = path.replace("{", "\0").replace("}", "\0").split("\0")
        url = "".join(ids.get(piece, piece) for piece in named)
        sent: dict[str, Any] = {}
        if method == "POST":
            complete = path.endswith("/complete")
            sent["json"] = {"part_ids": [part.id]} if complete else {"model": "tiny", "training_file": file}
        if path.endswith(("/files", "/parts")) and method == "POST":
            sent = {"files": {"data": CHAT}}
        for query in ("", f"?after={job.id}", f"?after={file}", "?metadata[k]=secret"):
            answer = world.http.request(method, url + query, headers=headers, **sent)
            assert answer.status_code in (200, 400, 404), (method, url, answer.text)
            if len(named) > 1:
                assert answer.status_code == 404, (method, url, answer.text)
                for name in ids.values():  # but for the id that was asked for
                    assert name in url or name not in answer.text
            assert "secret" not in answer.text.replace(model, "") and "ann" not in answer.text.replace(
                model, ""
            )
    assert everything(world) == before
    missing, own = (
        world.http.get(f"/v1/files/{name}", headers=headers).json() for name in ("file-" + "0" * 24, file)
    )
    assert missing == json.loads(json.dumps(own).replace(file, "file-" + "0" * 24))


def test_every_route_needs_a_key(world: World) -> None:
    tenant = new_tenant(world.service.store, "ann")
    keys = [new_key(world.service.store, tenant, lifetime) for lifetime in (-1, None)]
    with world.service.store.read() as session:
        revoke_key(world.service.store, session.scalars(select(Key.id).where(Key.expires_at.is_(None))).one())
    for method, path in with_prefix(world):
        if path == "/healthz":
            continue
        for value in (None, "Bearer", "Basic x", "Bearer sk-mux-0", *(f"Bearer {key}" for key in keys)):
            answer = world.http.request(
                method, path, headers={} if value is None else {"authorization": value}
            )
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert world.http.get("/healthz").json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        openai.OpenAI(
            http_client=world.http, base_url="http://127.0.0.1:8000/v1", api_key=keys[1]
        ).models.list()


def test_hosts(world: World) -> None:
    names = ("127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8000", "mux.example:8000")
    for name in names:
        assert world.http.get("/healthz", headers={"host": name}).status_code == 200
    for name in ("evil.example", "", "127.0.0.1.evil.example", "[::2]"):
        answer = world.http.get("/healthz", headers={"host": name})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_host"


def test_errors_have_openais_form(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {world.key('ann')}"}
    jobs = "/v1/fine_tuning/jobs"
    asked: list[tuple[str, str, Any, int]] = [
        ("GET", "/v1/nothing", None, 404), ("GET", f"{jobs}/", None, 404), ("PUT", jobs, None, 405),
        ("GET", f"{jobs}?limit=x", None, 400), ("GET", "/v1/files/a%00", None, 400),
        ("GET", "/v1/files?after=%00", None, 400), ("GET", "/v1/files/..%2f..%2ffirst-key", None, 404),
        ("POST", jobs, b"{", 400), ("POST", jobs, b"[" * 100_000, 400), ("POST", jobs, b"[]", 400),
        ("POST", jobs, b'{"model": "\xff"}', 400), ("POST", jobs, b'{"seed": 1e999}', 400),
        ("POST", jobs, b'{"seed": ' + b"9" * 5000 + b"}", 400), ("POST", jobs, b" " * 3_000_000, 413),
        ("POST", "/v1/uploads", b'{"bytes": "a"}', 400), ("POST", "/v1/uploads", b"", 400),
    ]  # fmt: skip
    for method, url, body, expected in asked:
        answer = world.http.request(method, url, headers=headers, content=body)
        assert answer.status_code == expected, (url, answer.text)
        assert answer.json()["error"].keys() >= {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"] and answer.headers["x-content-type-options"] == "nosniff"

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("/a/path/of/the/server")

    monkeypatch.setattr("megatron_mux.serve.api.files.page", broken)
    answer = world.http.get("/v1/files", headers=headers)
    assert (
        answer.status_code == 500
        and answer.json()["error"]["type"] == "server_error"
        and answer.headers["x-request-id"] in answer.text
    )
    assert "path" not in answer.text


def test_models(world: World) -> None:
    ann = world.client()
    file = upload(ann)
    job = ann.fine_tuning.jobs.create(model="tiny", training_file=file)
    with world.service.store.write() as session:
        row = session.scalars(select(Job)).one()
        row.model, row.status, row.finished_at = "ft:tiny:ann::1", "succeeded", 5.5
    bare, tuned = ann.models.list()
    assert (bare.id, bare.object, bare.owned_by) == ("tiny", "model", "megatron-mux")
    assert (tuned.id, tuned.created, tuned.owned_by) == ("ft:tiny:ann::1", 5, "ann")
    assert ann.models.retrieve(tuned.id) == tuned and ann.models.retrieve("tiny") == bare
    with pytest.raises(openai.PermissionDeniedError):
        ann.models.delete("tiny")
    assert ann.models.delete(tuned.id).deleted
    assert [own.id for own in ann.models.list()] == ["tiny"]
    assert ann.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
