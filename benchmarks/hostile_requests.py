"""Requests that a service must refuse or answer without harm: kinds of them, each drawn at random."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SECRET = "kingfisher"
"""In all that the other tenant has."""

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TRICKS = (
    "..", "../../first-key", "..%2f..%2ffirst-key", "%2e%2e/%2e%2e/service.db", "%00", "x%00.jsonl", "/etc/passwd",
    "file-" + "0" * 24, "a" * 9000, "\u202e\u0000", "'; DROP TABLE jobs; --", "{job_id}", "%ff%fe", "ft:tiny:ann:x:1",
)  # fmt: skip
HTML = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7*7 }}",
    "${jndi:ldap://x}",
    "\x1b[2J",
    "a\r\nX: y",
)
VALUES = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    "",
    "x" * 100_000,
    [],
    {},
    [[]] * 50,
    {"a": {"b": {}}},
    "\ud800",
    "NaN",
    [None],
)


@dataclass
class Service:
    """The server, its keys, and what the other tenant has.

    Attributes:
        port: Where it listens.
        pid: Of its process.
        keys: Of tenants, by their names.
        own: Ids of what the other tenant has, by the placeholders of paths.
    """

    port: int
    pid: int
    keys: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)

    def client(self, tenant: str = "") -> httpx.Client:
        """A client of a tenant, or one without a key."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=60)

    @property
    def resident(self) -> int:
        """Bytes of memory that the server holds."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def raw(self, *pieces: bytes) -> int | None:
        """Send bytes; returns the answer's status, None if the connection ends without one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            with suppress(OSError):
                for piece in pieces:
                    connection.sendall(piece)
            with suppress(OSError):
                line = connection.makefile("rb").readline(200)
                return int(line.split()[1]) if line.startswith(b"HTTP/") else None
        return None


Attack = Callable[[Service, random.Random], "httpx.Response | int | None"]


def _ids(service: Service, r: random.Random) -> httpx.Response:
    """What the other tenant has, at every route that takes an id."""
    routes = (
        ("GET", "/v1/files/{file}"), ("GET", "/v1/files/{file}/content"), ("DELETE", "/v1/files/{file}"),
        ("GET", "/v1/fine_tuning/jobs/{job}"), ("GET", "/v1/fine_tuning/jobs/{job}/events"),
        ("GET", "/v1/fine_tuning/jobs/{job}/checkpoints"), ("POST", "/v1/fine_tuning/jobs/{job}/cancel"),
        ("POST", "/v1/fine_tuning/jobs/{job}/pause"), ("POST", "/v1/fine_tuning/jobs/{job}/resume"),
        ("POST", "/v1/uploads/{upload}/complete"), ("POST", "/v1/uploads/{upload}/cancel"),
        ("POST", "/v1/uploads/{upload}/parts"), ("GET", "/v1/models/ft:tiny:default:{secret}:1"),
        ("GET", "/v1/files?after={file}"), ("GET", "/v1/fine_tuning/jobs?after={job}&metadata[k]={secret}"),
    )  # fmt: skip
    method, path = r.choice(routes)
    body = r.choice(
        [{}, {"part_ids": [service.own["upload"]]}, {"model": "tiny", "training_file": service.own["file"]}]
    )
    sent: dict[str, Any] = {} if method != "POST" else {"json": body}
    if path.endswith("/parts"):
        sent = {"files": {"data": b"x"}}
    with service.client("eve") as client:
        return client.request(method, path.format(secret="x", **service.own), **sent)


def _jobs_of_others(service: Service, r: random.Random) -> httpx.Response:
    """A job or chat that names another's file or model."""
    with service.client("eve") as client:
        if r.random() < 0.5:
            body = {"model": r.choice(["tiny", "nowhere", "../x"]), "training_file": service.own["file"]}
            return client.post("/v1/fine_tuning/jobs", json=body)
        body = {"model": f"ft:tiny:default:{SECRET}:1", "messages": [{"role": "user", "content": "hi"}]}
        answer = client.post("/v1/chat/completions", json=body)
        return httpx.Response(answer.status_code, text=answer.text.replace(body["model"], ""))


def _paths(service: Service, r: random.Random) -> httpx.Response:
    """Ids that are paths, patterns, or no text."""
    place = r.choice(
        ("/v1/files/{}", "/v1/files/{}/content", "/v1/models/{}", "/v1/fine_tuning/jobs/{}/events", "/{}")
    )
    with service.client("eve") as client:
        return client.request(
            r.choice(("GET", "DELETE", "POST")), place.format(r.choice(TRICKS).replace("\0", "%00"))
        )


def _markup(service: Service, r: random.Random) -> httpx.Response:
    """Names that a page might show."""
    name = r.choice(HTML)
    with service.client("eve") as client:
        if r.random() < 0.5:
            return client.post(
                "/v1/uploads", json={"bytes": 9, "filename": name, "mime_type": name, "purpose": "fine-tune"}
            )
        body = {"model": "tiny", "training_file": "file-0", "suffix": name, "metadata": {name[:60]: name}}
        return client.post("/v1/fine_tuning/jobs", json=body)


def _multipart(service: Service, r: random.Random) -> httpx.Response:
    """Forms of many parts, of many headers, without an end, and of names that are paths."""
    part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="%s"\r\n\r\n%s\r\n'
    bodies: tuple[Callable[[], bytes], ...] = (
        lambda: b"".join(part % (b"a", b"b") for _ in range(5000)) + b"--x--",
        lambda: b"--x\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(20_000)) + b"\r\n\r\n--x--",
        lambda: part % (b"a" * 1_000_000, b"b") + b"--x--",
        lambda: part % (b"../../../etc/passwd", json.dumps(CHAT).encode()) + b"--x--",
        lambda: part % (b"a", b"b" * 3_000_000),
        lambda: b"--y\r\n\r\n--y--",
        lambda: (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"p" * 2_000_000 + b"\r\n--x--"
        ),
        lambda: bytes(r.randrange(256) for _ in range(5000)),
    )
    kinds = (
        "multipart/form-data; boundary=x",
        "multipart/form-data",
        "multipart/form-data; boundary=" + "x" * 5000,
    )
    headers = {"content-type": r.choice(kinds)}
    with service.client("eve") as client:
        return client.post("/v1/files", content=r.choice(bodies)(), headers=headers)


def _files(service: Service, r: random.Random) -> httpx.Response:
    """Training files that are broken, and jobs that name them."""
    line = json.dumps(CHAT).encode()
    content = r.choice(
        (b"", b"\0" * 1000, b"\x1f\x8b" + bytes(500), b"\xff\xfe" + line, line[:-3], b"[" * 100_000,
         line + b"\n" + b"{" * 5,
         b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
         b'{"messages": "' + b"x" * 3_000_000 + b'"}', b"1e999", b"NaN", line.replace(b"user", b"system\\u0000"))
    )  # fmt: skip
    with service.client("eve") as client:
        made = client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("x.jsonl", content)})
        if made.status_code != 200:
            return made
        name = made.json()["id"]
        body: dict[str, Any] = {"model": "tiny", "training_file": name}
        if r.random() < 0.3:
            body[r.choice(("adapter", "data", "training", "eval"))] = r.choice(VALUES[:9])
        job = client.post("/v1/fine_tuning/jobs", json=body)
        with suppress(ValueError, KeyError, TypeError):
            client.post(f"/v1/fine_tuning/jobs/{job.json()['id']}/cancel")
        client.delete(f"/v1/files/{name}")
        return job


def _bodies(service: Service, r: random.Random) -> httpx.Response:
    """JSON that is broken, deep, large, or of other types than expected."""
    place = r.choice(("/v1/fine_tuning/jobs", "/v1/chat/completions", "/v1/uploads"))
    valid: dict[str, dict[str, Any]] = {
        "/v1/fine_tuning/jobs": {"model": "tiny", "training_file": "file-0", "seed": 1,
                                 "method": {"type": "supervised"},
                                 "hyperparameters": {"n_epochs": 1}, "training": {"max_steps": 1}, "adapter": {"r": 1}},
        "/v1/chat/completions": {"model": "nowhere", "messages": [{"role": "user", "content": "x"}], "n": 1,
                                 "stop": "x",
                                 "max_tokens": 1, "temperature": 1, "top_p": 1, "stream": True, "logprobs": True},
        "/v1/uploads": {"bytes": 9, "filename": "x", "mime_type": "x", "purpose": "fine-tune"},
    }  # fmt: skip
    raw = (b"[" * 200_000, b'{"a":' * 50_000, b"{", b"\xff", b'{"model": "tiny", "model": 1}', b"1" * 100_000,
           b'"\\ud800"', b"x" * 3_000_000)  # fmt: skip
    with service.client("eve") as client:
        if r.random() < 0.3:
            return client.post(place, content=r.choice(raw), headers={"content-type": "application/json"})
        body = valid[place]
        body[r.choice([*body, "x" * 300, "__proto__", "wandb"])] = r.choice(VALUES)
        return client.post(place, content=json.dumps(body), headers={"content-type": "application/json"})


def _headers(service: Service, r: random.Random) -> httpx.Response:
    """Keys, hosts, ages and numbers that are none."""
    headers = r.choice(
        ({"host": "evil.example"}, {"authorization": "Bearer " + "x" * 60_000}, {"authorization": "Basic eDp5"},
         {f"x-{i}": "y" * 100 for i in range(300)}, {"x-stainless-retry-count": "9" * 400}, {"content-length": "-1"},
         {"authorization": "Bearer ' OR 1=1"}, {"cookie": "a=" + "b" * 30_000}, {"x-stainless-retry-count": "\u0661"})
    )  # fmt: skip
    encoded = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items()}
    with service.client(r.choice(("eve", ""))) as client:
        return client.request(r.choice(("GET", "POST")), "/v1/files", headers=encoded)


def _queries(service: Service, r: random.Random) -> httpx.Response:
    """Pages that cannot be."""
    query = r.choice(("limit=-1", "limit=" + "9" * 5000, "limit=x", "after=%00", "order=up",
                      "metadata[" + "a" * 3000 + "]=1",
                      "&".join(f"metadata[{i}]={i}" for i in range(2000)), "purpose=%ff",
                      "limit=1&limit=2"))  # fmt: skip
    with service.client("eve") as client:
        return client.get(r.choice(("/v1/files", "/v1/fine_tuning/jobs", "/v1/models")) + "?" + query)


def _sockets(service: Service, r: random.Random) -> int | None:
    """Bytes that are no request, two requests in one, lengths that are not so, and connections that break off."""
    host, key = b"host: 127.0.0.1\r\n", f"authorization: Bearer {service.keys['eve']}\r\n".encode()
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    attacks: tuple[tuple[bytes, ...], ...] = (
        (b"\x16\x03\x01\x02\x00\x01\x00",), (b"GET / HTTP/9.9\r\n\r\n",), (b"A" * 100_000,),
        (b"GET  HTTP/1.1\r\n\r\n",),
        (b"POST /v1/files HTTP/1.1\r\n" + host + key + b"content-length: 99999999999\r\n\r\nx",),
        (b"POST /v1/files HTTP/1.1\r\n" + host + key + b"content-length: 9\r\n" + chunked + b"0\r\n\r\n",),
        (b"POST /v1/chat/completions HTTP/1.1\r\n" + host + key + chunked + b"ffffffffffffffff\r\n",),
        (b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n" + b"GET /v1/files HTTP/1.1\r\n" + host + b"\r\n",),
        (b"GET /healthz HTTP/1.1\r\n", b"x-a: ", b"b" * 20_000, b"\r\n", host, b"\r\n"),
        (b"GET /healthz HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n" + host + b"\r\n",),
        (b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",), (b"GET http://evil.example/ HTTP/1.1\r\n" + host + b"\r\n",),
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", service.port)) as broken:  # in the middle of a body
        broken.sendall(b"POST /v1/files HTTP/1.1\r\n" + host + key + b"content-length: 100\r\n\r\n--x")
    pieces = r.choice(attacks)
    if b"99999999999" in pieces[0] or b"ffffffff" in pieces[0]:  # nobody waits for the rest
        with socket.create_connection(("127.0.0.1", service.port)) as promised:
            promised.sendall(pieces[0])
        return None
    return service.raw(*pieces)


ATTACKS: dict[str, Attack] = {
    attack.__name__[1:].replace("_", " "): attack
    for attack in (
        _ids,
        _jobs_of_others,
        _paths,
        _markup,
        _multipart,
        _files,
        _bodies,
        _headers,
        _queries,
        _sockets,
    )
}
