"""Where `megatron-mux serve` listens: keys are never sent in the open unless the operator says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mux.cli import serve
from megatron_mux.serve import server
from megatron_mux.serve.settings import Settings
from megatron_mux.split import certificates


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Services that were begun."""
    found: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda settings, say: found.append(settings))
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A server's certificate, its key, and the key of another one."""
    for name in ("own", "other"):
        assert certificates.main([str(tmp_path / name), "--server", "gpu.example"]) == 0
    own = tmp_path / "own"
    return {
        "cert": str(own / "server.pem"),
        "key": str(own / "server.key"),
        "other": str(tmp_path / "other" / "server.key"),
    }


def test_off_loopback_it_has_tls_or_is_told_not_to(
    tmp_path: Path, files: dict[str, str], started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(listen: str, *words: str) -> str:
        begun = len(started)
        usual = ["--backbone", f"tiny={tmp_path}", "--state", str(tmp_path / "state")]
        status = serve.main([*usual, "--listen", listen, *words])
        assert (status == 0) == (len(started) > begun) and status in (0, 2)
        return capsys.readouterr().err

    tls = ("--tls-cert", files["cert"], "--tls-key", files["key"])
    assert "in the open" in run("10.1.2.3:80") and "in the open" in run("gpu.example:80")
    assert "by which name" in run("0.0.0.0:80", "--plain-http") and "by which name" in run("[::]:443", *tls)
    assert "give both" in run("127.0.0.1:80", *tls[:2])
    assert "no PEM files" in run("10.1.2.3:80", *tls[:3], files["other"])
    assert "--tls-key nowhere: cannot be read" in run("10.1.2.3:80", *tls[:3], "nowhere")
    assert not started

    assert (
        not run("127.0.0.1:80")
        + run("[::1]:80")
        + run("10.1.2.3:80", "--plain-http")
        + run("[::1]:443", *tls)
    )
    assert not run("0.0.0.0:443", *tls, "--host", "gpu.example")
    assert [own.url(own.port) for own in started] == [
        "http://127.0.0.1:80/v1",
        "http://[::1]:80/v1",
        "http://10.1.2.3:80/v1",
        "https://[::1]:443/v1",
        "https://gpu.example:443/v1",
    ]
