"""Make the certificates of a server of split fine-tuning and of its clients.

    python -m megatron_mux.split.certificates DIR --server localhost --client alice bob
    python -m megatron_mux.split.certificates DIR --client carol    # later, signed by the same CA
    python -m megatron_mux.split.certificates DIR --revoke bob    # servers end his streams, and refuse new ones

DIR gets ca.pem, server.pem and NAME.pem of each client, each with its private key. Give a client its NAME.pem, NAME.key
and ca.pem; ca.key signs, and is needed nowhere else. A client's NAME is its identity on the server. Servers read
crl.pem, the list of what was revoked, beside ca.pem; issued.txt has the serial numbers of all clients' certificates.
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, path
from megatron_mux.errors import UserError, exit_status
from megatron_mux.files import write_atomically
from megatron_mux.split.protocol.revocations import CRL, read_crl
from megatron_mux.split.tls import IDENTITY

_RESERVED = frozenset({"ca", "server"})

_CA_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)
_SECRET = 0o600
_ISSUED = "issued.txt"


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, directory: Path, name: str) -> None:
        """Write NAME.key, which only its owner may read, and NAME.pem."""
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_atomically(directory / f"{name}.key", key.decode(), _SECRET)
        write_atomically(directory / f"{name}.pem", self.certificate.public_bytes(Encoding.PEM).decode())


def make_ca() -> Identity:
    """Make a certificate authority, which signs servers and clients."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megatron-mux split fine-tuning CA")])
    builder = _unsigned(name, name, key, datetime.now(UTC) + timedelta(days=_CA_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Identity(builder.sign(key, SHA256()), key)


def make_server(ca: Identity, names: Sequence[str], until: datetime) -> Identity:
    """Make a server's certificate.

    Args:
        names: DNS names and IP addresses of the server.
    """
    return _make(ca, names[0][:64], until, ExtendedKeyUsageOID.SERVER_AUTH, _alternative_names(names))


def make_client(ca: Identity, name: str, until: datetime) -> Identity:
    """Make a client's certificate."""
    return _make(ca, name, until, ExtendedKeyUsageOID.CLIENT_AUTH, ())


def _make(
    ca: Identity,
    name: str,
    until: datetime,
    usage: x509.ObjectIdentifier,
    alternatives: Iterable[x509.GeneralName],
) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _unsigned(subject, ca.certificate.subject, key, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = builder.add_extension(signer, critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return Identity(builder.sign(ca.key, SHA256()), key)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    # Certificates that have expired are made by tests only; they were valid once, too.
    since = min(datetime.now(UTC), until) - _CLOCK_SKEW
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=since,
        not_valid_after=until,
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    """The names as extensions have them; `localhost` gets its addresses too, since users give either."""
    all_names = dict.fromkeys([*names, *(["127.0.0.1", "::1"] if "localhost" in names else [])])
    unique: dict[x509.GeneralName, None] = {}
    for name in all_names:
        try:
            unique[x509.IPAddress(ipaddress.ip_address(name))] = None
        except ValueError:
            try:
                unique[x509.DNSName(name)] = None
            except ValueError:
                raise UserError(f"--server {name}: must be a DNS name (in ASCII) or an IP address") from None
    return list(unique)


def write_certificates(
    directory: Path, servers: Sequence[str], clients: Sequence[str], days: int, replace: bool
) -> list[str]:
    """Write what a server and clients need; see the module.

    Args:
        directory: Where. Its CA is used if it has one.
        servers: The server's names; empty: `localhost` if the directory has no server's certificate yet.
        clients: Names of clients.
        days: How long the server's and clients' certificates are valid.
        replace: Whether to replace certificates that exist.

    Returns:
        Names of the files written, without their suffixes.

    Raises:
        UserError: A name is unusable, or exists and may not be replaced, or the CA is unusable. Nothing is written.
    """
    _check_clients(clients)
    try:
        new_ca = not ((directory / "ca.pem").exists() or (directory / "ca.key").exists())
        keeps_server = not new_ca and not (replace and servers) and _has_server(directory, servers)
        existing = [name for name in clients if (directory / f"{name}.pem").exists() and not replace]
        if existing:
            raise UserError(
                f"--client {' '.join(existing)}: {directory} has these certificates already; --replace makes new ones"
            )
        ca = make_ca() if new_ca else _read_ca(directory)
        until = min(datetime.now(UTC) + timedelta(days=days), ca.certificate.not_valid_after_utc)
        made = {"ca": ca} if new_ca else {}
        if not keeps_server:
            made["server"] = make_server(ca, servers or ["localhost"], until)
        made |= {name: make_client(ca, name, until) for name in clients}
        if clients:
            _note_issued(directory, {name: made[name] for name in clients})
        for name, identity in made.items():
            identity.write(directory, name)
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {error.strerror or error}") from None
    return list(made)


def _note_issued(directory: Path, made: Mapping[str, Identity]) -> None:
    """Note serial numbers, so that certificates that were replaced can be revoked, too."""
    file = directory / _ISSUED
    lines = file.read_text() if file.exists() else ""
    lines += "".join(f"{issued.certificate.serial_number:x} {name}\n" for name, issued in made.items())
    write_atomically(file, lines)


def revoke_certificates(directory: Path, clients: Sequence[str]) -> int:
    """Revoke all certificates that clients have been given so far, in `crl.pem`.

    Returns:
        How many.

    Raises:
        UserError: A client has none, or the CA or the list is unusable. Nothing is written.
    """
    now, file, ca_file = datetime.now(UTC), directory / CRL, directory / "ca.pem"
    try:
        ca = _read_ca(directory)
        entries = read_crl(file, ca_file) if file.exists() else {}
        serials = {serial for name in clients for serial in _serials_of(directory, name)}
        for serial in serials - entries.keys():
            entries[serial] = x509.RevokedCertificateBuilder(serial, now).build()
        builder = x509.CertificateRevocationListBuilder(
            ca.certificate.subject,
            now,
            ca.certificate.not_valid_after_utc,
            revoked_certificates=[*entries.values()],
        )
        write_atomically(file, builder.sign(ca.key, SHA256()).public_bytes(Encoding.PEM).decode())
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {error.strerror or error}") from None
    return len(serials)


def _serials_of(directory: Path, name: str) -> set[int]:
    """Serial numbers of the certificates that a client has been given."""
    issued, last = directory / _ISSUED, directory / f"{name}.pem"
    pairs = [line.split() for line in issued.read_text().splitlines()] if issued.exists() else []
    serials = {int(serial, 16) for serial, other in pairs if other == name}
    if (
        IDENTITY.fullmatch(name) and name not in _RESERVED and last.exists()
    ):  # of a version without issued.txt
        serials.add(x509.load_pem_x509_certificate(last.read_bytes()).serial_number)
    if not serials:
        raise UserError(f"--revoke {name}: no certificate of that client was made in {directory}")
    return serials


def _check_clients(clients: Sequence[str]) -> None:
    for name in clients:
        if not IDENTITY.fullmatch(name) or name in _RESERVED:
            raise UserError(
                f"--client {name}: must be made of letters, digits, '-', '_' and '.', have at most 64 characters, and "
                "not be 'ca' or 'server'"
            )


def _has_server(directory: Path, servers: Sequence[str]) -> bool:
    """Whether the directory has a certificate of the server with all these names."""
    file = directory / "server.pem"
    if not file.exists():
        return False
    try:
        extensions = x509.load_pem_x509_certificate(file.read_bytes()).extensions
        has = set(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound):
        has = set()
    if not has.issuperset(_alternative_names(servers)):
        raise UserError(f"--server: {file} exists and has other names; --replace makes a new one")
    return True


def _read_ca(directory: Path) -> Identity:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        key = load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise UserError(f"{directory}: ca.pem or ca.key cannot be used: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UserError(f"{directory}: ca.key is not the key of ca.pem; delete both to make a new CA")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise UserError(
            f"{directory / 'ca.pem'} has expired; delete ca.pem and ca.key, and make all files again"
        )
    return Identity(certificate, key)


def build_parser(program: str = "python -m megatron_mux.split.certificates") -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(
        prog=program,
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("directory", type=path, metavar="DIR", help="where to write; a CA that it has is used again")
    add(
        "--server",
        nargs="+",
        default=[],
        metavar="NAME",
        help="DNS names and IP addresses of the server (localhost, with 127.0.0.1 and ::1)",
    )
    add("--client", nargs="+", default=[], metavar="NAME", help="identities of clients")
    add("--revoke", nargs="+", default=[], metavar="NAME",
        help="clients whose certificates of before are refused from now on")  # fmt: skip
    add("--days", type=at_least(1, _CA_DAYS), default=365, help="how long certificates are valid (365)")
    add("--replace", action="store_true", help="replace the named certificates that exist")
    return parser


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run the tool.

    Args:
        argv: Words of the command line; by default those of this process.

    Returns:
        The exit status.
    """

    def work() -> None:
        options = (build_parser(program) if program else build_parser()).parse_args(argv)
        if options.revoke:
            count = revoke_certificates(options.directory, options.revoke)
            print(
                f"{options.directory / CRL}: {count} certificates of {', '.join(options.revoke)} are revoked"
            )
            if not (options.server or options.client):
                return
        made = write_certificates(
            options.directory, options.server, options.client, options.days, options.replace
        )
        for name in made:
            print(f"{options.directory / name}.pem, {name}.key")

    return exit_status(work, program or "certificates")


if __name__ == "__main__":
    sys.exit(main())
