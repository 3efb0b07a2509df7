"""A session comes back to the same server, and sessions are spread evenly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_mux.errors import UserError
from megatron_mux.split.client.affinity import choose_server

SERVERS = [f"server-{i}:7070" for i in range(5)]
SESSIONS = [f"client-{i}/task" for i in range(1000)]


def of_all(servers: Sequence[str]) -> dict[str, str]:
    return {session: choose_server(",".join(servers), session)[0] for session in SESSIONS}


def test_order_does_not_matter_and_only_sessions_of_a_server_that_goes_move() -> None:
    before = of_all(SERVERS)
    assert of_all(SERVERS[::-1]) == before
    after = of_all(SERVERS[1:])
    assert all(after[session] == server for session, server in before.items() if server != SERVERS[0])


def test_sessions_are_spread_evenly() -> None:
    found = list(of_all(SERVERS).values())
    assert all(found.count(server) == pytest.approx(200, rel=0.15) for server in SERVERS)


def test_a_name_with_several_addresses_is_several_servers() -> None:
    def resolve(host: str, port: int) -> list[str]:
        fourth, sixth = ["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]
        found = {"many": fourth, "sixth": sixth, "dual": fourth + sixth, "one": fourth[:1]}
        return {**found, "both": ["127.0.0.1", "::1"]}[host]

    def chosen(name: str) -> set[tuple[str, str | None]]:
        return {choose_server(f"{name}:7070", session, resolve) for session in SESSIONS}

    assert chosen("many") == {("10.0.0.1:7070", "many"), ("10.0.0.2:7070", "many")}
    assert chosen("dual") == {("10.0.0.1:7070", "dual"), ("10.0.0.2:7070", "dual")}
    assert chosen("sixth") == {("[fd00::1]:7070", "sixth"), ("[fd00::2]:7070", "sixth")}
    assert choose_server("one:7070", "a", resolve) == ("one:7070", None)
    assert choose_server("both:7070", "a", resolve) == ("both:7070", None)  # one machine's two addresses


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        choose_server("a:1,b", "session")
