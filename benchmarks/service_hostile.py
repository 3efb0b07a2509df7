"""A thousand requests of a hostile tenant, and of clients without a key, against a real service.

python benchmarks/service_hostile.py --output benchmarks/results/service-hostile.json    # two minutes

Another tenant has a file, an upload that is not complete and a paused job, all of which carry a secret word. The status
is 1 if a request gets an answer of 500 or more, if any answer has the secret, if what the other tenant sees changes, or
if the server's memory grows beyond its bound.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hostile_requests import ATTACKS, CHAT, SECRET, Service
from script import QUICKSTART, ROOT, add_output, command_line, environment, measured_on, publish, table

from tests.end_to_end.service_process import ServiceProcess

MOST_GROWTH = 64 << 20
"""Bytes by which the server's memory may grow: bodies that are being read, caches of what was parsed."""


@contextmanager
def running(backbone: Path, state: Path) -> Iterator[Service]:
    """A service with two tenants; what it has started ends with it."""
    process = ServiceProcess(backbone, state)
    try:
        service = Service(process.port, process.process.pid, {"ann": process.first_key})
        admin = [
            sys.executable,
            "-m",
            "megatron_mux.cli",
            "serve-admin",
            "--state",
            str(state),
            "add-tenant",
            "eve",
        ]
        added = subprocess.run(admin, cwd=ROOT, capture_output=True, text=True, check=True)
        service.keys["eve"] = added.stdout.strip()
        yield service
    finally:
        process.kill()
        process.kill_instances()


def _furnish(service: Service) -> None:
    """Give the other tenant something to lose."""
    line = json.dumps(CHAT).replace('"b"', json.dumps(SECRET)) + "\n"
    with service.client("ann") as client:
        upload = client.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": (f"{SECRET}.jsonl", line * 20)}
        )
        service.own["file"] = upload.json()["id"]
        pending = {"bytes": 9, "filename": SECRET, "mime_type": "text/jsonl", "purpose": "fine-tune"}
        service.own["upload"] = client.post("/v1/uploads", json=pending).json()["id"]
        body = {
            "model": "tiny",
            "training_file": service.own["file"],
            "suffix": SECRET,
            "metadata": {"k": SECRET},
        }
        service.own["job"] = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        for _ in range(600):
            client.post(f"/v1/fine_tuning/jobs/{service.own['job']}/pause")
            job = client.get(f"/v1/fine_tuning/jobs/{service.own['job']}").json()
            if job["status"] == "paused":
                return
            time.sleep(0.1)
    raise SystemExit(f"the other tenant's job does not pause: {job}")


def _seen(service: Service) -> str:
    """What the other tenant sees."""
    with service.client("ann") as client:
        job = f"/v1/fine_tuning/jobs/{service.own['job']}"
        places = ("/v1/files", f"/v1/files/{service.own['file']}/content", "/v1/fine_tuning/jobs", job, f"{job}/events",
                  f"{job}/checkpoints", "/v1/models")  # fmt: skip
        return json.dumps([client.get(place).text for place in places])


def _attack(service: Service, name: str, r: random.Random) -> tuple[str, str]:
    """One request; returns its status and the text of its answer."""
    try:
        answer = ATTACKS[name](service, r)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        # The client's own library refuses to send it, or the server closes while it sends.
        return f"not sent: {type(error).__name__}", ""
    if isinstance(answer, httpx.Response):
        return str(answer.status_code), answer.text
    return "closed" if answer is None else str(answer), ""


def dribbled(service: Service, connections: int = 50) -> float:
    """Seconds until the server has closed connections whose headers do not end."""
    opened = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(connections)]
    start = time.monotonic()
    for connection in opened:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: local")
        connection.settimeout(60)
    for connection in opened:
        assert connection.recv(1) == b""
        connection.close()
    return time.monotonic() - start


def measure(backbone: Path, state: Path, requests: int, seed: int) -> dict[str, Any]:
    """Attack a service."""
    r = random.Random(seed)
    with running(backbone, state) as service:
        _furnish(service)
        before, resident = _seen(service), service.resident
        statuses: dict[str, Counter[str]] = {name: Counter() for name in ATTACKS}
        failures, leaks = [], []
        for number in range(requests):
            name = list(ATTACKS)[number % len(ATTACKS)]
            status, text = _attack(service, name, r)
            statuses[name][status] += 1
            if status.isdecimal() and int(status) >= 500:
                failures.append(f"{name}: {status} {text[:200]}")
            if SECRET in text:
                leaks.append(f"{name}: {text[:200]}")
            if number % 100 == 99:
                print(f"{number + 1} of {requests}", file=sys.stderr, flush=True)
        closed_s = dribbled(service)
        with service.client() as client:
            alive = client.get("/healthz").status_code == 200
        return {
            "requests": requests,
            "seed": seed,
            "statuses": {name: dict(sorted(found.items())) for name, found in statuses.items()},
            "failures": failures,
            "leaks": leaks,
            "changed": _seen(service) != before,
            "alive": alive,
            "growth_bytes": service.resident - resident,
            "dribbled_closed_s": round(closed_s, 1),
        }


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    rows = [
        (name, sum(found.values()), ", ".join(f"{count} x {status}" for status, count in found.items()))
        for name, found in result["statuses"].items()
    ]
    changed = "changed" if result["changed"] else "not changed"
    verdict = (
        f"{len(result['failures'])} answers of 500 or more, {len(result['leaks'])} with another's secret; what the "
        f"other tenant sees has {changed}; memory grew by {result['growth_bytes'] / 2**20:.0f} MiB; headers that do "
        f"not end were closed after {result['dribbled_closed_s']} s."
    )
    return "\n".join([measured_on(result), "", *table("attack | requests | answers", rows), "", verdict])


def main(argv: Sequence[str] | None = None) -> int:
    """Attack and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backbone", type=Path, default=QUICKSTART / "backbone")
    add_output(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.backbone, Path(folder) / "state", arguments.requests, arguments.seed)
    result |= environment("quickstart", "float32", 1, packages=("fastapi", "uvicorn", "starlette"))
    publish(result, markdown(result), arguments.output)
    fails = result["failures"] or result["leaks"] or result["changed"] or not result["alive"]
    return int(bool(fails) or result["growth_bytes"] > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
