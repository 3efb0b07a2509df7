"""Which of several servers a session belongs to: its state is there, so it must come back to the same one."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.split.tls import split_address

Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of a name, sorted.

    Raises:
        UserError: It has none.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"--server {host}:{port}: the name cannot be resolved: {error.strerror or error}"
        ) from None
    return sorted({str(entry[4][0]) for entry in infos})


def choose_server(servers: str, session: str, resolve: Resolve = resolve) -> tuple[str, str | None]:
    """The server of a session, by rendezvous hashing: if one goes, only its sessions move.

    Args:
        servers: `HOST:PORT`, or several of them with commas between. A name with several addresses is several servers,
            which share a certificate for the name; of IPv4 and IPv6, the one with more addresses counts.
        session: Names the session.
        resolve: Returns a name's addresses.

    Returns:
        `HOST:PORT`, and the name in the server's certificate, if that is not the host.

    Raises:
        UserError: An address is malformed, or a name cannot be resolved.
    """
    given = [server.strip() for server in servers.split(",")]
    candidates: list[tuple[str, str | None]] = [(server, None) for server in given]
    if len(given) == 1:
        host, port = split_address(given[0])
        addresses = max(_by_family(resolve(host, port)), key=len)
        if len(addresses) > 1:
            candidates = [(f"{_bracketed(address)}:{port}", host) for address in addresses]
    for server, _ in candidates:
        split_address(server)
    return max(candidates, key=lambda candidate: _weight(candidate[0], session))


def identity_of(certificate: Path) -> str:
    """The common name of a certificate, which is the client's identity.

    Raises:
        UserError: The file is no certificate.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        subject = x509.load_pem_x509_certificate(certificate.read_bytes()).subject
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"--tls-cert {certificate}: is no certificate of a client: {error}") from None


def _weight(server: str, session: str) -> bytes:
    return hashlib.sha256(f"{server}\0{session}".encode()).digest()


def _by_family(addresses: Sequence[str]) -> tuple[list[str], list[str]]:
    """IPv4 and IPv6 addresses."""
    sixth = [address for address in addresses if ":" in address]
    return [address for address in addresses if address not in sixth], sixth


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
