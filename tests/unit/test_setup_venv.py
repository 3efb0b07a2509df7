"""The bootstrap of the virtual environment: what it decides, without installing anything."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_venv() -> ModuleType:
    """`tools/setup_venv.py` as a module."""
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fake_python(folder: Path, name: str, version: str) -> Path:
    """Answers the probe as a Python of that version would; with no version it fails, as pyenv's shims do."""
    path = folder / name
    answer = f"echo {version}; echo {path}" if version else "echo 'command not found' >&2; exit 127"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_a_name_on_the_search_path_is_not_enough(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shims, real = tmp_path / "shims", tmp_path / "pyenv/versions/3.77.2/bin"
    shims.mkdir()
    real.mkdir(parents=True)
    _fake_python(shims, "python3.77", "")
    wanted = _fake_python(real, "python3.77", "3.77")
    monkeypatch.setenv("PATH", f"{shims}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert setup_venv.find_python(["3.77"]) == str(wanted)
    assert setup_venv.find_python(["3.78", "3.77"]) == str(wanted)
    assert setup_venv.find_python(["3.78"]) is None


def test_probe_tells_by_its_status(setup_venv: ModuleType, tmp_path: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert setup_venv.main([str(tmp_path / "venv"), "--versions", here, "--probe"]) == 0
    assert setup_venv.main([str(tmp_path / "venv"), "--versions", "3.78", "--probe"]) == 1
    assert not (tmp_path / "venv").exists()


def test_without_a_python_it_says_so(
    setup_venv: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup_venv.main([str(tmp_path / "venv"), "--versions", "3.78"]) == 2
    assert "found no Python 3.78" in capsys.readouterr().out


def test_a_stamped_environment_is_left_alone(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def install(venv: Path, python: str) -> bool:
        calls.append(venv)
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()
        return True

    monkeypatch.setattr(setup_venv, "install", install)
    arguments = [str(tmp_path / "venv"), "--python", sys.executable]
    assert setup_venv.main(arguments) == 0 and setup_venv.main(arguments) == 0
    assert len(calls) == 1
    monkeypatch.setattr(setup_venv, "fingerprint", lambda python: "another recipe")
    assert setup_venv.main(arguments) == 0
    assert len(calls) == 2


def test_the_cpu_build_is_preferred_without_a_gpu(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pip(venv: Path, *words: str, quiet: bool = False) -> bool:
        asked.append(words[-1])
        return words[-1] == "torch==2.13.0"

    monkeypatch.setattr(setup_venv, "pip", pip)
    monkeypatch.setattr(setup_venv, "output_of", lambda command: None)
    assert setup_venv.install_torch(tmp_path, gpu=False)
    assert asked == ["torch==2.13.0+cpu", "torch==2.13.0"]
    assert setup_venv.install_torch(tmp_path, gpu=True) and len(asked) == 2
