#!/usr/bin/env python3
"""Create a virtual environment with megatron-mux installed; later calls return at once.

    python3 tools/setup_venv.py .venv --versions 3.11 3.12 [--python PATH] [--probe]

The Makefile runs it with the machine's `python3` (3.9 or newer); it uses the standard library only, and searches for
the Python of the environment. A stamp file records what was installed: a change of setup.py, of this script or
of the Python installs again.

On a machine with a GPU, torch is the one that the Python already has, else the package index's default. Without
a GPU it is the CPU build if pip can get it, since the CUDA build has several GB that are of no use there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_TORCH = ["torch==2.13.0+cpu", "torch==2.13.0", "torch>=2.11"]  # in the order of preference
EXTRAS = "dev"
DISK_NEEDED = 9 << 30  # bytes, for the CUDA build of torch with its dependencies and downloads


def output_of(command: Sequence[str]) -> str | None:
    """Return the standard output of a command, or None if it fails or does not exist."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=60, text=True).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def candidates(version: str) -> list[str]:
    """List possible paths of a Python version: the search path, folders of pyenv and uv, system folders."""
    name = "python" + version
    homes = [
        (Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser(), "versions/{}.*/bin/" + name),
        (Path("~/.local/share/uv/python").expanduser(), "cpython-{}.*/bin/" + name),
    ]
    found = [shutil.which(name), sys.executable, shutil.which("python3")]
    for home, pattern in homes:
        found += [str(path) for path in sorted(home.glob(pattern.format(version)), reverse=True)]
    found += [str(Path(folder, name)) for folder in ("/usr/local/bin", "/usr/bin", "/opt/homebrew/bin")]
    return [path for path in dict.fromkeys(found) if path]


def find_python(versions: Sequence[str]) -> str | None:
    """Find a Python that can create environments, by the order of versions.

    Each candidate is run, since a file on the search path may not work (pyenv leaves one for every version).
    """
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
    for version in versions:
        for path in candidates(version):
            lines = (output_of([path, "-c", probe]) or "").splitlines()
            if len(lines) == 2 and lines[0] == version:
                return lines[1]
    return None


def has_gpu() -> bool:
    """Whether this machine has a CUDA device, found without torch."""
    return bool(output_of(["nvidia-smi", "-L"])) or Path("/dev/nvidia0").exists()


def fingerprint(python: str) -> str:
    """Return a hash of everything that determines what is installed."""
    parts = [(ROOT / "setup.py").read_bytes(), Path(__file__).read_bytes()]
    parts.append((output_of([python, "-VV"]) or "").encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip(venv: Path, *words: str, quiet: bool = False) -> bool:
    """Run the environment's pip; returns whether it succeeds. Errors are printed unless `quiet`."""
    command = [str(venv / "bin" / "python"), "-m", "pip", *words]
    done = subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False)
    return done.returncode == 0


def install_torch(venv: Path, gpu: bool) -> bool:
    """Install torch as described at the top of this file; it then satisfies the requirement of setup.py."""
    python = str(venv / "bin" / "python")
    if output_of([python, "-c", "import torch"]) is not None or gpu:
        return True
    for choice in CPU_TORCH:
        if not choice.endswith("+cpu") and sys.platform == "linux":
            say(
                "there is no CPU build of torch for this Python: installing the package index's default, several GB"
            )
            if shutil.disk_usage(venv).free < DISK_NEEDED:
                say(f"less than {DISK_NEEDED >> 30} GiB of disk is free, which is too little for it")
                return False
        if pip(venv, "install", "-qq", "--no-input", choice, quiet=choice != CPU_TORCH[-1]):
            return True
    return False


def install(venv: Path, python: str) -> bool:
    """Create the environment and install the package into it, editable; returns whether that succeeds.

    Args:
        venv: Folder of the environment; recreated if it does not work or has another Python.
        python: The Python to create it with.
    """
    version = "import sys; print(sys.version)"
    inside = str(venv / "bin" / "python")
    if output_of([inside, "-m", "pip", "--version"]) is None or output_of(
        [inside, "-c", version]
    ) != output_of([python, "-c", version]):
        say(f"creating {venv} with {python}")
        gpu_torch = has_gpu() and output_of([python, "-c", "import torch"]) is not None
        keep = ["--system-site-packages"] if gpu_torch else []
        made = subprocess.run([python, "-m", "venv", "--clear", *keep, str(venv)], check=False)
        if made.returncode:
            return False
    say(f"installing megatron-mux and its dependencies into {venv} (minutes, the first time)")
    package = ["--editable", f"{ROOT}[{EXTRAS}]"]
    return install_torch(venv, has_gpu()) and pip(venv, "install", "-qq", "--no-input", *package)


def say(line: str) -> None:
    """Print a line of progress."""
    print("[venv] " + line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the environment is ready, 1 if `--probe` finds no Python, 2 after an error message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument("--versions", nargs="+", default=["3.11", "3.12"], help="in order of preference")
    parser.add_argument("--python", help="use this interpreter")
    parser.add_argument(
        "--probe", action="store_true", help="only check whether there is such a Python; install nothing"
    )
    options = parser.parse_args(arguments)
    python = shutil.which(options.python) if options.python else find_python(options.versions)
    if options.probe:
        return 0 if python else 1
    if not python:
        wanted = options.python or " or ".join(options.versions)
        say(
            f"found no Python {wanted} that can create environments; install one, or name it: make PYTHON=..."
        )
        return 2
    venv, start = options.venv.resolve(), time.time()
    stamp, contents = venv / ".installed", fingerprint(python)
    if stamp.is_file() and stamp.read_text() == contents and (venv / "bin" / "python").exists():
        return 0
    if not install(venv, python):
        say("installation failed: see above; `make venv` continues where it stopped")
        return 2
    stamp.write_text(contents)
    say(f"ready after {time.time() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
