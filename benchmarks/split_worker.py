"""The processes of `split.py`: forked from a server that has imported everything, each enters its namespace.

split_worker.py server NAMESPACE FILE FLAGS...           a server that writes its figures to FILE at SIGUSR2
split_worker.py client NAMESPACE FILE MODEL TLS NAME ADDRESS    the real client; a line of JSON for each step
split_worker.py requests NAMESPACE FILE MODEL TLS NAME ADDRESS... requests without a client's layers, by commands
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from split_network import enter  # noqa: E402


def serve(file: Path, flags: Sequence[str]) -> None:
    """Be a server. SIGUSR1: what is measured begins. SIGUSR2: write figures."""
    from megatron_mux.split.server import run as run_server
    from megatron_mux.split.server.__main__ import PROGRAM, build_parser, check_files
    from megatron_mux.split.server.scheduler import Demand, Scheduler

    most, schedulers = 0, []

    class RecordingScheduler(Scheduler):
        """Notes the most that was reserved at once."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            schedulers.append(self)

        def grant(self, now: float) -> list[Demand]:
            nonlocal most
            granted = super().grant(now)
            most = max(most, self.capacity - self.free)
            return granted

    def begin(number: int, frame: object) -> None:
        nonlocal most
        most = schedulers[0].capacity - schedulers[0].free

    def write(number: int, frame: object) -> None:
        whole = {"most_reserved": most, "capacity": schedulers[0].capacity, "cpu_s": time.process_time()}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(whole))
        partial.replace(file)

    run_server.Scheduler = RecordingScheduler  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, write)
    arguments = build_parser().parse_args(known_flags(flags))
    check_files(arguments)
    run_server.run(arguments, PROGRAM)


def known_flags(flags: Sequence[str]) -> list[str]:
    """Flags of the server; the policy `reforward-with-gradients` (Menos, Figure 3c) is made of one of its own."""
    if "reforward-with-gradients" not in flags:
        return [*flags]
    from megatron_mux.split.server import policies, requests
    from megatron_mux.split.server.session import PendingBackward

    def plan(policy: object, memory: Any, rows: int, now: object) -> policies.ForwardPlan:
        """Build a graph, and keep memory for the input only."""
        backward, hidden = memory.backward_of(rows), memory.scaled(memory.hidden, rows)
        return policies.ForwardPlan("graph", backward, hidden, backward)

    def drop(operation: int, rows: Any, plan: Any, kept: object, reservation: int) -> PendingBackward:
        return PendingBackward(operation, rows, plan, None, reservation)

    requests.plan_forward = plan
    requests.PendingBackward = drop  # type: ignore[misc, assignment]
    return ["preserve" if word == "reforward-with-gradients" else word for word in flags]


def train(file: Path, model: Path, tls: Path, name: str, address: str) -> None:
    """Be a client: train, and write for each step when it ended and what its requests took."""
    from split_model import SERVER_NAME, task

    from megatron_mux.split.client import link
    from megatron_mux.split.client.trainer import SplitTrainer
    from megatron_mux.split.protocol.messages import Message, Output
    from megatron_mux.split.tls import ClientTls

    waits: list[float] = []

    def add(self: link.RequestTotals, seconds: float, reply: Message) -> None:
        count(self, seconds, reply)
        if isinstance(reply.fields, Output):
            waits.append(reply.fields.waited_s)

    count, link.RequestTotals.add = link.RequestTotals.add, add  # type: ignore[method-assign]

    class RecordingLink(link.ServerConnection):
        """Writes a line at the end of each step."""

        def decide(self, step: int, norm: float, skip: bool) -> None:
            super().decide(step, norm, skip)
            own = self.totals
            line = {
                "ended": time.monotonic(),
                "cpu_s": time.process_time(),
                "requests_s": own.seconds,
                "waited_s": own.waited_s,
                "computed_s": own.computed_s,
                "waits": waits[:],
            }
            waits.clear()
            lines.write(json.dumps(line) + "\n")

    from megatron_mux.split.client import run as client_run

    client_run.ServerConnection = RecordingLink  # type: ignore[misc]
    with file.open("w", buffering=1) as lines:
        SplitTrainer(
            backbone=model,
            task=task(model),
            server=address,
            tls=ClientTls(tls / "ca.pem", tls / f"{name}.pem", tls / f"{name}.key", SERVER_NAME),
            cut_front=1,
            cut_back=0,
            log_interval=10_000,
            device="cpu",
            progress=False,
        ).train()


def request(
    commands: IO[str], answers: IO[str], model: Path, tls: Path, name: str, addresses: Sequence[str]
) -> None:
    """Be a client without layers: for each command, send random rows forward and backward to one of the servers.

    A command has `server`, `rows` and `seconds`; the answer is a list of when each pair of passes ended.
    """
    import torch
    from split_model import SERVER_NAME, proposal

    from megatron_mux.backbone.registry import read_backbone_info
    from megatron_mux.split.client.link import ServerConnection
    from megatron_mux.split.client.transport import Transport
    from megatron_mux.split.protocol.messages import Backward, Forward
    from megatron_mux.split.protocol.wire import Flags, Kind, Limits
    from megatron_mux.split.tls import ClientTls

    info = read_backbone_info(model)
    files = ClientTls(tls / "ca.pem", tls / f"{name}.pem", tls / f"{name}.key", SERVER_NAME)
    links = []
    for address in addresses:
        transport = Transport(address, files, Limits(), say=lambda text: None)
        links.append(ServerConnection(transport, proposal(info.fingerprint, 256, 256, name), info.shape))
        links[-1].join()
    answers.write("[]\n")
    answers.flush()
    for line in commands:
        asked = json.loads(line)
        link, ended = links[asked["server"]], []
        rows = torch.randn(asked["rows"], info.shape.hidden, generator=torch.Generator().manual_seed(0))
        until = time.monotonic() + asked["seconds"]
        while time.monotonic() < until:
            training, operation = Flags.TRAINING | Flags.NEEDS_INPUT, link.next_operation
            link.request(Kind.FORWARD, Forward(lengths=[len(rows)], ids=[0]), training, rows)
            last = Flags.LAST | Flags.NEEDS_INPUT
            link.request(Kind.BACKWARD, Backward(forward=operation), last, rows / len(rows))
            link.decide(link.step, 1.0, False)
            ended.append(time.monotonic())
        answers.write(json.dumps(ended) + "\n")
        answers.flush()


def main() -> None:
    """Enter the namespace and be what the command line says."""
    role, namespace, file, *rest = sys.argv[1:]
    enter(namespace)
    os.environ["OMP_NUM_THREADS"] = "1"
    if role == "server":
        serve(Path(file), rest)
    elif role == "client":
        train(Path(file), Path(rest[0]), Path(rest[1]), rest[2], rest[3])
    else:
        request(sys.stdin, sys.stdout, Path(rest[0]), Path(rest[1]), rest[2], rest[3:])


if __name__ == "__main__":
    main()
