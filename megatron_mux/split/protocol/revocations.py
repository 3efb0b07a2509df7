"""Clients' certificates that their CA has revoked: an X.509 CRL, which servers read again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from cryptography import x509

from megatron_mux.errors import UserError

CRL = "crl.pem"
"""Name of the list beside its CA's certificate."""

_SECONDS_BETWEEN_LOOKS = 1.0

_log = logging.getLogger(__name__)


def read_crl(file: Path, ca: Path) -> dict[int, x509.RevokedCertificate]:
    """The entries of a list of revoked certificates, by serial number.

    Raises:
        OSError: A file cannot be read.
        UserError: It is no CRL in PEM format, or no CA of `ca` has signed it.
    """
    try:
        crl = x509.load_pem_x509_crl(file.read_bytes())
        keys: list[Any] = [cert.public_key() for cert in x509.load_pem_x509_certificates(ca.read_bytes())]
    except ValueError as error:
        raise UserError(f"{file} is no list of revoked certificates (CRL) in PEM format: {error}") from None
    if not any(crl.is_signature_valid(key) for key in keys):
        raise UserError(f"{file}: {ca} did not sign this list of revoked certificates")
    return {entry.serial_number: entry for entry in crl}


class Revocations:
    """Tells when certificates are revoked. A list that cannot be read leaves the one before it in force.

    Args:
        file: The list, which may appear later.
        ca: The CA's certificate.

    Raises:
        UserError: The list is there, but cannot be used.
    """

    def __init__(self, file: Path, ca: Path) -> None:
        self._file, self._ca = file, ca
        self._serials: frozenset[int] = frozenset()
        self._state: tuple[int, int, int] | None = None  # of the file, when it was read
        self._looks_again = 0.0
        self._read()

    async def wait_for(self, serial: int) -> None:
        """Return once a certificate is revoked."""
        while True:
            now = time.monotonic()
            if now >= self._looks_again:  # whoever waits
                self._looks_again = now + _SECONDS_BETWEEN_LOOKS
                try:
                    self._read()
                except UserError as error:
                    _log.error("%s; the list before it stays in force", error)
            if serial in self._serials:
                return
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    def _read(self) -> None:
        try:
            stat = self._file.stat()
            state = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if state != self._state:
                self._state = state
                self._serials = frozenset(read_crl(self._file, self._ca))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self._file} cannot be read: {error.strerror or error}") from None
