from __future__ import annotations

import hashlib
import io
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from megatron_mux.serve.api.files import remove_leftovers
from megatron_mux.serve.database.tables import Job
from tests.unit.serve.api.world import CHAT, World, upload


def on_disk(world: World) -> list[str]:
    return sorted(path.name for path in world.service.settings.files.glob("*"))


def test_a_file_is_stored_listed_read_and_deleted(world: World) -> None:
    client = world.client()
    made = client.files.create(file=("dir/../näme\u202e.jsonl", io.BytesIO(CHAT)), purpose="fine-tune")
    assert (made.object, made.bytes, made.purpose, made.status) == (
        "file",
        len(CHAT),
        "fine-tune",
        "processed",
    )
    assert made.filename == "näme.jsonl"
    assert client.files.retrieve(made.id) == made == client.files.wait_for_processing(made.id)
    answer = client.files.content(made.id)
    assert answer.content == CHAT and answer.response.headers["content-type"] == "application/octet-stream"
    assert [own.id for own in client.files.list(purpose="fine-tune")] == [made.id]
    assert not client.files.list(purpose="batch").data
    assert client.files.delete(made.id).deleted and on_disk(world) == []
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert (caught.value.param, caught.value.code) == ("file_id", "not_found")


def test_lists_are_paged(world: World) -> None:
    client = world.client()
    ids = [upload(client, name=f"{number}.jsonl") for number in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        first = client.files.list(limit=2, order=order)  # type: ignore[arg-type]
        assert first.has_more and [own.id for own in first.data] == expected[:2]
        raw = first.model_dump()
        assert (raw["object"], raw["first_id"], raw["last_id"]) == ("list", *expected[:2])
        assert [own.id for own in first] == expected  # the client asks for the other pages


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"data": {"purpose": "vision"}}, 400, "purpose"),
        ({"data": {}}, 400, "purpose"),
        ({"data": {"purpose": "fine-tune", "expires_after[seconds]": "1"}}, 400, "expires_after[seconds]"),
        ({"data": {"purpose": "x" * 5000}}, 400, None),
        ({"files": {"other": CHAT}}, 400, "file"),
        ({"files": {"file": b""}}, 400, "file"),
        ({"files": [("file", CHAT)] * 2}, 400, None),
        ({"files": {"file": b"x" * 300_001}}, 413, None),
        ({"files": {"file": b"x" * 900_000}}, 413, None),
        ({"files": None}, 400, None),
        ({"files": None, "content": b"--x\r\n\r\n", "type": "multipart/form-data; boundary=x"}, 400, None),
        ({"files": None, "content": b"a", "type": "multipart/form-data"}, 400, None),
        (
            {"files": None, "content": b"--x--", "type": "multipart/form-data; boundary=x; charset=hex"},
            400,
            "file",
        ),
        ({"files": None, "content": b"{}", "type": "application/json"}, 400, None),
    ],
)
def test_wrong_uploads_are_refused_and_leave_nothing(
    world: World, changes: dict[str, Any], status: int, param: str | None
) -> None:
    headers = {"authorization": f"Bearer {world.key('ann')}"}
    kind = changes.pop("type", None)
    if kind:
        headers["content-type"] = kind
        changes["data"] = None
    parts: dict[str, Any] = {"files": {"file": CHAT}, "data": {"purpose": "fine-tune"}, **changes}
    answer = world.http.post("/v1/files", headers=headers, **parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert on_disk(world) == []


def test_quotas_and_the_reserve_of_the_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    for _ in range(2):
        upload(client, b"x" * 300_000)
    with pytest.raises(openai.RateLimitError) as caught:
        upload(client, b"x" * 300_000)
    assert caught.value.type == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false" and len(on_disk(world)) == 2
    other = world.client("bob")  # whom this does not concern
    for _ in range(6):
        upload(other)
    with pytest.raises(openai.RateLimitError, match="6 files"):
        upload(other)
    world.service.settings = replace(world.service.settings, reserve_bytes=shutil.disk_usage("/").total * 2)
    with pytest.raises(openai.RateLimitError) as caught:
        upload(world.client("eve"))
    assert caught.value.code == "disk_reserve"


def test_the_reserve_is_watched_while_a_file_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([10, -1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(answers)))
    with pytest.raises(openai.RateLimitError):
        upload(world.client())
    assert on_disk(world) == [] and next(answers, None) is None


def test_a_file_that_a_job_needs_is_kept(world: World) -> None:
    client = world.client()
    file = upload(client)
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file)
    with pytest.raises(openai.BadRequestError, match=job.id) as caught:
        client.files.delete(file)
    assert caught.value.code == "file_in_use"
    client.fine_tuning.jobs.cancel(job.id)
    assert client.files.delete(file).deleted


def test_a_retry_finds_the_first_file(world: World) -> None:
    client = world.client()
    first = upload(client)
    again = client.files.create(
        file=("data.jsonl", CHAT), purpose="fine-tune", extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.id == first != upload(client) and len(on_disk(world)) == 2


def test_leftovers_of_a_killed_server_are_removed(world: World) -> None:
    kept = upload(world.client())
    for name in (".partial-file-1", "file-2"):
        (world.service.settings.files / name).touch()
    remove_leftovers(world.service)
    assert on_disk(world) == [kept]


def test_a_file_comes_in_parts(world: World) -> None:
    client = world.client()
    content = CHAT * 2000
    md5 = hashlib.md5(content).hexdigest()
    made = client.uploads.upload_file_chunked(
        file=content, filename="big.jsonl", bytes=len(content), mime_type="text/jsonl", purpose="fine-tune",
        part_size=50_000, md5=md5,
    )  # fmt: skip
    assert made.status == "completed" and made.object == "upload" and made.file is not None
    assert made.expires_at == made.created_at + 3600 and made.bytes == len(content) == made.file.bytes
    assert client.files.content(made.file.id).content == content
    assert client.uploads.complete(made.id, part_ids=["part-1"]).file == made.file  # a retry changes nothing
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.uploads.parts.create(made.id, data=b"more")
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.uploads.cancel(made.id)
    assert not list(world.service.settings.state.glob("uploads/*/*/part-*"))


def test_wrong_parts_are_refused(world: World) -> None:
    client = world.client()

    def begin(size: int) -> str:
        return client.uploads.create(bytes=size, filename="f", mime_type="", purpose="fine-tune").id

    with pytest.raises(openai.APIStatusError) as caught:
        begin(300_001)
    assert caught.value.status_code == 413
    upload_id = begin(6)
    part = client.uploads.parts.create(upload_id, data=b"abc")
    assert (part.object, part.upload_id) == ("upload.part", upload_id)
    for refused in ([part.id], [part.id, "../../first-key"], ["part-0"]):
        with pytest.raises(openai.BadRequestError):
            client.uploads.complete(upload_id, part_ids=refused)
    with pytest.raises(openai.APIStatusError) as caught:
        client.uploads.parts.create(upload_id, data=b"abcd")  # one byte more than announced
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(upload_id, part_ids=[part.id] * 2, md5="0")
    assert client.uploads.cancel(upload_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.uploads.complete(upload_id, part_ids=[part.id] * 2)
    begin(300_000), begin(300_000)
    with pytest.raises(openai.RateLimitError):
        begin(300_000)
    assert on_disk(world) == []


def test_files_of_jobs_that_are_over_can_go(world: World) -> None:
    client = world.client()
    file = upload(client)
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file)
    with world.service.store.write() as session:
        session.query(Job).filter_by(id=job.id).one().status = "succeeded"
    assert client.files.delete(file).deleted
