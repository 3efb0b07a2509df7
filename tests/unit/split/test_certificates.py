"""Certificates are made once, for the names given, and never overwrite others unasked."""

from __future__ import annotations

import ipaddress
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from megatron_mux.errors import UserError
from megatron_mux.split import certificates
from megatron_mux.split.certificates import main
from megatron_mux.split.protocol.revocations import read_crl
from megatron_mux.split.tls import ClientTls, ServerTls, read_files, split_address


def run(directory: Path, *words: str) -> int:
    return main([str(directory), *words])


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_server_and_clients(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert (
            run(tmp_path, "--server", "localhost", "10.1.2.3", "gpu.example", "--client", "alice", "bob") == 0
        )
    finally:
        os.umask(old)
    names = ("ca", "server", "alice", "bob")
    made = {f"{name}.{end}" for name in names for end in ("pem", "key")}
    assert set(content(tmp_path)) == {*made, "issued.txt"}
    ca = certificate(tmp_path / "ca.pem")
    for name in names:
        assert stat.S_IMODE((tmp_path / f"{name}.key").stat().st_mode) == 0o600
        found = certificate(tmp_path / f"{name}.pem")
        found.verify_directly_issued_by(ca)
        key = found.public_key()
        assert isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
        read_files(tmp_path / "ca.pem", tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    alternatives = certificate(tmp_path / "server.pem").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert alternatives.value.get_values_for_type(x509.DNSName) == ["localhost", "gpu.example"]
    addresses = ["10.1.2.3", "127.0.0.1", "::1"]
    assert alternatives.value.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in addresses
    ]
    alice = certificate(tmp_path / "alice.pem")
    assert [a.value for a in alice.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["alice"]
    usage = alice.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    days = (alice.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)
    assert 364.9 < days <= 365


def test_later_calls_add_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--client", "alice") == 0
    before = content(tmp_path)
    assert run(tmp_path, "--server", "localhost", "--client", "bob", "--days", "9") == 0
    after = content(tmp_path)
    assert after["issued.txt"].startswith(before.pop("issued.txt"))
    assert {name: after[name] for name in before} == before and set(after) - set(before) == {
        "bob.pem",
        "bob.key",
        "issued.txt",
    }
    assert run(tmp_path, "--client", "alice", "carol") == 2
    assert run(tmp_path, "--server", "elsewhere", "--client", "carol") == 2
    assert content(tmp_path) == after
    told = capsys.readouterr().err
    assert "--client alice: " in told and "other names" in told and told.count("--replace") == 2
    assert run(tmp_path, "--client", "alice", "--replace") == 0
    replaced = content(tmp_path)
    changed = {name for name in after if replaced[name] != after[name]}
    assert changed == {"alice.pem", "alice.key", "issued.txt"}
    assert run(tmp_path, "--server", "elsewhere", "--replace") == 0
    assert content(tmp_path)["server.pem"] != after["server.pem"]
    assert content(tmp_path)["ca.pem"] == after["ca.pem"]


def test_all_that_a_client_was_given_is_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def serial(name: str) -> int:
        return certificate(tmp_path / f"{name}.pem").serial_number

    run(tmp_path, "--client", "alice", "bob")
    revoked = [serial("alice")]
    run(tmp_path, "--client", "alice", "--replace")
    revoked.append(serial("alice"))
    assert run(tmp_path, "--revoke", "mallory") == run(tmp_path, "--revoke", "../alice") == 2
    assert (
        not (tmp_path / "crl.pem").exists() and "--revoke mallory: no certificate" in capsys.readouterr().err
    )
    assert run(tmp_path, "--revoke", "alice", "--client", "alice", "--replace") == 0
    assert "2 certificates of alice are revoked" in capsys.readouterr().out
    assert read_crl(tmp_path / "crl.pem", tmp_path / "ca.pem").keys() == {*revoked}
    assert serial("alice") not in revoked
    (tmp_path / "issued.txt").unlink()  # as in a directory of an earlier version
    assert run(tmp_path, "--revoke", "bob") == 0
    assert read_crl(tmp_path / "crl.pem", tmp_path / "ca.pem").keys() == {*revoked, serial("bob")}
    run(tmp_path / "other")
    with pytest.raises(UserError, match="did not sign"):
        read_crl(tmp_path / "crl.pem", tmp_path / "other/ca.pem")


def test_files_are_named_by_text_too(tmp_path: Path) -> None:
    text = ClientTls("a/ca.pem", "a/me.pem", "a/me.key", "host")  # type: ignore[arg-type]
    assert text == ClientTls.of("a", "me", "host") and text.server_name == "host"
    assert ServerTls("c", "k", "a").key == Path("k")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ca", "server", "", "a/b", "..", ".a", "a" * 65, "a b", "ä"])
def test_names_of_clients(tmp_path: Path, name: str) -> None:
    assert run(tmp_path / "new", "--client", name) == 2
    assert not (tmp_path / "new").exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--server", "bücher.example") == 2
    assert run(tmp_path, "--days", "0") == run(tmp_path, "--what") == 2
    (tmp_path / "file").touch()
    assert run(tmp_path / "file") == 2
    assert "must be a DNS name" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pem"))


def test_a_ca_that_cannot_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    key = tmp_path / "a" / "ca.key"
    key.write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    assert run(tmp_path / "a", "--client", "alice") == 2
    key.write_text("nonsense")
    assert run(tmp_path / "a", "--client", "alice") == 2
    key.unlink()
    assert run(tmp_path / "a", "--client", "alice") == 2
    told = capsys.readouterr().err
    assert "not the key of ca.pem" in told and "cannot be used" in told and "ca.key: No such file" in told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "_CA_DAYS", -1)
        certificates.make_ca().write(tmp_path / "b", "ca")
    assert run(tmp_path / "b", "--client", "alice") == 2
    assert "ca.pem has expired" in capsys.readouterr().err


def test_a_new_ca_signs_a_new_server(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "ca.pem").unlink()
    (tmp_path / "ca.key").unlink()
    assert run(tmp_path, "--client", "alice") == 0
    certificate(tmp_path / "server.pem").verify_directly_issued_by(certificate(tmp_path / "ca.pem"))


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    run(tmp_path, "--client", "alice", "bob")
    ca, alice, bob = (tmp_path / f"{name}.pem" for name in ("ca", "alice", "bob"))
    for files, told in {
        (ca, alice, tmp_path / "bob.key"): "not a certificate and its private key",
        (tmp_path / "bob.key", alice, tmp_path / "alice.key"): "holds no certificate",
        (ca, alice, tmp_path / "none.key"): "none.key cannot be read: No such file",
        (ca, bob, bob): "not a certificate and its private key",
    }.items():
        with pytest.raises(UserError, match=told):
            read_files(*files)


def test_addresses() -> None:
    assert split_address("localhost:1") == ("localhost", 1) and split_address("[::1]:65535") == ("::1", 65535)
    for wrong in ("localhost", ":1", "a:b", "::1:5", "a:65536", "[]:1", "a:-1", ""):
        with pytest.raises(UserError, match="HOST:PORT"):
            split_address(wrong)
