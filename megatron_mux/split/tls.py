"""Files of TLS on both ends, checked before gRPC gets them, and a handshake that says why a connection fails.

gRPC reports every failed connection as unavailable, mostly without a reason. So a client makes one handshake of its own
first: it tells a server that is not there yet, which is worth another try, from a refused certificate, which is not.
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_mux.errors import UserError

IDENTITY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Identities of clients: they fit a certificate's common name, and may be names of files."""

_SECONDS_TO_CONNECT = 10.0

_VERIFY_EXPIRED = 10
_VERIFY_NAMES = (62, 64)  # OpenSSL's codes of wrong host names and IP addresses
_MAKE = "python -m megatron_mux.split.certificates DIR"


class _Files:
    """Turns text into paths, in fields other than names."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) and name != "server_name":
                object.__setattr__(self, name, Path(value))


@dataclass(frozen=True)
class ServerTls(_Files):
    """Files of the server's TLS, as paths or text.

    Attributes:
        certificate: The server's certificate.
        key: Its private key.
        client_ca: The CA that signs its clients' certificates.
        client_crl: That CA's list of revoked certificates, which may appear later; None: `crl.pem` beside the CA.
    """

    certificate: Path
    key: Path
    client_ca: Path
    client_crl: Path | None = None


@dataclass(frozen=True)
class ClientTls(_Files):
    """Files of a client's TLS, as paths or text.

    Attributes:
        ca: The CA that signed the server's certificate.
        certificate: The client's certificate; its common name is the client's identity.
        key: Its private key.
        server_name: Name in the server's certificate, if the address has another.
    """

    ca: Path
    certificate: Path
    key: Path
    server_name: str | None = None

    @classmethod
    def of(cls, directory: Path | str, name: str, server_name: str | None = None) -> ClientTls:
        """The files that `certificates` has written for a client; `name` is its identity."""
        home = Path(directory)
        return cls(home / "ca.pem", home / f"{name}.pem", home / f"{name}.key", server_name)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        UserError: It is none.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and address[0] != "["):
        raise UserError(f"{address}: must be HOST:PORT, as in localhost:50051 or [::1]:50051")
    return host, int(port)


def read_files(ca: Path, certificate: Path, key: Path) -> tuple[bytes, bytes, bytes]:
    """Content of the files, once they are known to be usable together.

    Raises:
        UserError: A file is missing, is not PEM, or the key is not the certificate's.
    """
    _context(ca, certificate, key)
    return ca.read_bytes(), certificate.read_bytes(), key.read_bytes()


def _context(ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """What a client's end of a connection needs."""
    for file in (ca, certificate, key):
        try:
            file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise UserError(f"{ca} holds no certificate of a CA in PEM format") from None
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise UserError(
            f"{certificate} and {key} are not a certificate and its private key, unencrypted PEM"
        ) from None
    return context


def probe(address: str, tls: ClientTls | None) -> None:
    """Connect to a server as gRPC is going to, and close the connection.

    Args:
        address: `HOST:PORT`.
        tls: Files of the client; None: connect only.

    Raises:
        OSError: No server is there, or it left during the handshake.
        UserError: One end refuses the other's certificate, or a file is unusable.
    """
    host, port = split_address(address)
    if tls is None:
        socket.create_connection((host, port), _SECONDS_TO_CONNECT).close()
        return
    context = _context(tls.ca, tls.certificate, tls.key)
    name = tls.server_name or host
    try:
        # gRPC closes the connection of a client that it refuses without a word; a server that is killed may, too, once.
        if not any(_is_accepted(context, host, port, name) for _ in range(2)):
            raise UserError(_of_client(address, tls, "it closes the connection"))
    except ssl.SSLCertVerificationError as error:
        raise UserError(_of_server(address, tls, error)) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionResetError(error.strerror) from None
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            raise UserError(_of_client(address, tls, reason)) from None
        raise UserError(f"{address}: no server that speaks TLS is there ({reason})") from None


def _is_accepted(context: ssl.SSLContext, host: str, port: int, name: str) -> bool:
    """Make a handshake; returns whether the server says something after it, which it does if it accepts the client."""
    plain = socket.create_connection((host, port), _SECONDS_TO_CONNECT)
    with plain, context.wrap_socket(plain, server_hostname=name) as secured:
        try:
            return secured.recv(1) != b""
        except ConnectionError:
            return False


def _of_server(address: str, tls: ClientTls, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _VERIFY_EXPIRED:
        return f"{address}: the server's certificate has expired; make a new one: {_MAKE} --server NAME --replace"
    if error.verify_code in _VERIFY_NAMES:
        return (
            f"{address}: the server's certificate is for another name ({error.verify_message}); connect to a name that "
            f"it has, or make a new one: {_MAKE} --server NAME --replace"
        )
    return (
        f"{address}: the CA {tls.ca} did not sign the server's certificate ({error.verify_message}); use the ca.pem "
        "that was made with it"
    )


def _of_client(address: str, tls: ClientTls, reason: str) -> str:
    from cryptography import x509

    until = x509.load_pem_x509_certificate(tls.certificate.read_bytes()).not_valid_after_utc
    if until < datetime.now(UTC):
        return f"{tls.certificate} has expired on {until:%Y-%m-%d}; make a new one: {_MAKE} --client NAME --replace"
    return (
        f"{address}: the server refuses the certificate {tls.certificate} ({reason}): its CA did not sign it, or not "
        f"for a client; make one with that CA: {_MAKE} --client NAME"
    )
