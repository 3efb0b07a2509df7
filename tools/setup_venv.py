#!/usr/bin/env python3
"""Make a virtual environment with megatron-mux in it, once; a second call returns at once.

    python3 tools/setup_venv.py .venv --versions 3.11 3.12 [--python PATH] [--probe]

Run by the Makefile with whatever `python3` the machine has (3.9 or newer): only the standard library is used,
and the Python that goes into the environment is looked for. What was installed is remembered in a stamp: a
change of setup.py, of this script or of the Python installs again.

Which torch: on a machine with a GPU, the one its Python already has, else the package index's own choice.
Without a GPU, the CPU build where pip can get it, since the CUDA build brings several GB that nothing there
can use.
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
CPU_TORCH = ["torch==2.13.0+cpu", "torch==2.13.0", "torch>=2.11"]  # in the order they are tried
EXTRAS = "dev"
DISK_NEEDED = 9 << 30  # bytes: the CUDA build of torch with all it brings, downloads included


def output_of(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None when it fails or does not exist."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=60, text=True).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def candidates(version: str) -> list[str]:
    """Where a Python of this version may be: search path, pyenv's and uv's folders, system folders."""
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
    """The first Python of the first version that can be had, and that can make environments.

    A name on the search path proves nothing (pyenv puts one there for every version it ever saw): run each.
    """
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
    for version in versions:
        for path in candidates(version):
            lines = (output_of([path, "-c", probe]) or "").splitlines()
            if len(lines) == 2 and lines[0] == version:
                return lines[1]
    return None


def has_gpu() -> bool:
    """Whether a CUDA device is at hand, told without torch."""
    return bool(output_of(["nvidia-smi", "-L"])) or Path("/dev/nvidia0").exists()


def fingerprint(python: str) -> str:
    """Changes with whatever decides what is installed."""
    parts = [(ROOT / "setup.py").read_bytes(), Path(__file__).read_bytes()]
    parts.append((output_of([python, "-VV"]) or "").encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip(venv: Path, *words: str, quiet: bool = False) -> bool:
    """Run the environment's pip; its errors are shown unless `quiet`."""
    command = [str(venv / "bin" / "python"), "-m", "pip", *words]
    done = subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False)
    return done.returncode == 0


def install_torch(venv: Path, gpu: bool) -> bool:
    """See the top of this file. Afterwards setup.py's own range finds torch there and leaves it."""
    python = str(venv / "bin" / "python")
    if output_of([python, "-c", "import torch"]) is not None or gpu:
        return True
    for choice in CPU_TORCH:
        if not choice.endswith("+cpu") and sys.platform == "linux":
            say("no CPU build of torch for this Python: taking the package index's own, several GB")
            if shutil.disk_usage(venv).free < DISK_NEEDED:
                say(f"less than {DISK_NEEDED >> 30} GiB of disk is free: that is too little for it")
                return False
        if pip(venv, "install", "-qq", "--no-input", choice, quiet=choice != CPU_TORCH[-1]):
            return True
    return False


def install(venv: Path, python: str) -> bool:
    """Make the environment and put the package into it, in editable form.

    Args:
        venv: Folder of the environment; what does not run, or runs another Python, is made anew.
        python: The Python it is made from.
    """
    version = "import sys; print(sys.version)"
    inside = str(venv / "bin" / "python")
    if output_of([inside, "-m", "pip", "--version"]) is None or output_of(
        [inside, "-c", version]
    ) != output_of([python, "-c", version]):
        say(f"making {venv} with {python}")
        gpu_torch = has_gpu() and output_of([python, "-c", "import torch"]) is not None
        keep = ["--system-site-packages"] if gpu_torch else []
        made = subprocess.run([python, "-m", "venv", "--clear", *keep, str(venv)], check=False)
        if made.returncode:
            return False
    say(f"installing megatron-mux and what it needs into {venv} (minutes, the first time)")
    package = ["--editable", f"{ROOT}[{EXTRAS}]"]
    return install_torch(venv, has_gpu()) and pip(venv, "install", "-qq", "--no-input", *package)


def say(line: str) -> None:
    """A line of progress, at once."""
    print("[venv] " + line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the environment is ready; 1 when `--probe` finds no Python; 2 after a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument("--versions", nargs="+", default=["3.11", "3.12"], help="in order of preference")
    parser.add_argument("--python", help="use this interpreter")
    parser.add_argument("--probe", action="store_true", help="install nothing: is there such a Python?")
    options = parser.parse_args(arguments)
    python = shutil.which(options.python) if options.python else find_python(options.versions)
    if options.probe:
        return 0 if python else 1
    if not python:
        wanted = options.python or " or ".join(options.versions)
        say(f"no Python {wanted} found that can make environments; install one, or name it: make PYTHON=...")
        return 2
    venv, start = options.venv.resolve(), time.time()
    stamp, contents = venv / ".installed", fingerprint(python)
    if stamp.is_file() and stamp.read_text() == contents and (venv / "bin" / "python").exists():
        return 0
    if not install(venv, python):
        say("installing failed: see above; `make venv` continues where it stopped")
        return 2
    stamp.write_text(contents)
    say(f"ready after {time.time() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
