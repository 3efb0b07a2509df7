"""Where measured profiles are kept: one JSON file each, named by everything that its seconds depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from megatron_mux.errors import UserError
from megatron_mux.files import cache_directory, write_atomically
from megatron_mux.fusion.device import cpu_name
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.profiler.expert_managers import with_managers
from megatron_mux.fusion.profiler.profile import FORMAT, Profile, key_of
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.runtime import uses_tf32
from megatron_mux.shape import BackboneShape


def about_run(
    shape: Any,
    kind: str,
    dtype: Any,
    tensor_parallel: int,
    threads: int | None = None,
    busy: int | None = None,
    expert_parallel: int = 1,
    expert_tensor: int | None = None,
) -> dict[str, Any]:
    """Everything that the seconds of a backbone's operators depend on; on a GPU, whether this process uses TF32, too.

    Args:
        kind: `cpu` or `cuda`: what this process computes on; or a GPU's name, such as `H100`, that is elsewhere.
        threads: Threads of each process that compute on a CPU; by default this process's.
        busy: Processes that compute on the host's CPU at the same time, sharing its caches and memory; by default this
            run's, as torchrun says. A GPU belongs to one process.
        expert_tensor: Ranks that share each expert; by default as many as share each layer.
    """
    config = json.dumps(shape.config, sort_keys=True, default=str)
    about: dict[str, Any] = {"device": kind, "kind": "cuda", "threads": 0}
    if kind == "cuda":
        about["device"] = torch.cuda.get_device_name()
    elif kind == "cpu":
        about = {
            "device": cpu_name(),
            "kind": kind,
            "threads": torch.get_num_threads() if threads is None else threads,
            "cores": os.cpu_count(),
            "busy": int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if busy is None else busy,
        }
    changed = {
        "quantised": shape.quantisation and str(shape.quantisation),
        "tf32": kind == "cuda" and str(dtype) == "torch.float32" and uses_tf32(),
        "expert_parallel": shape.experts and expert_parallel != 1 and expert_parallel,
        "expert_tensor": shape.experts and expert_tensor != tensor_parallel and expert_tensor,
    }
    return {
        **about,
        "backbone": hashlib.sha256(config.encode()).hexdigest()[:16],
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel": tensor_parallel,
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        # Present only where they are not the default: other profiles keep their names.
        **{name: value for name, value in changed.items() if value},
    }


def find_profile(
    shape: Any,
    about: dict[str, Any],
    directory: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Profile:
    """The measured profile of a backbone on a device, else a roofline.

    On a CPU, a profile measured with another number of busy processes stands in for one that is missing: the one
    nearest in number.

    Args:
        directory: Where profiles are kept; by default `profile_directory`.
        say: Told of a stand-in, of a profile of an earlier version, and of a file that is not a profile, which is then
            ignored; without it, such a file is refused.

    Raises:
        UserError: The file is not a profile.
    """
    wanted = about.get("busy", 1)
    others = range(1, max(wanted, os.cpu_count() or 1) + 1) if "busy" in about else ()
    outdated = False
    for count in sorted({wanted, *others}, key=lambda count: (abs(count - wanted), -count)):
        measured_with = {**about, "busy": count} if "busy" in about else about
        try:
            profile = load_profile(measured_with, directory or profile_directory())
        except UserError as error:
            if say is None:
                raise
            say(f"{error}; going on without it")
            continue
        if profile is not None and count != wanted and say is not None:
            say(
                f"no profile was measured with {wanted} process(es) busy: using the one with {count} "
                f"(megatron-mux profile --processes {wanted} measures it)"
            )
        if profile is not None:
            return profile
        older = (directory or profile_directory()) / f"{key_of(measured_with, FORMAT - 1)}.json"
        if say is not None and not outdated and older.exists():
            outdated = True
            say(
                f"{older}: a profile of an earlier version (format {FORMAT - 1}) is not used: measure again with "
                "megatron-mux profile"
            )
    return roofline(shape, about, getattr(torch, about["dtype"]).itemsize, about["tensor_parallel"])


def profile_of_mesh(
    mesh: Mesh,
    shape: BackboneShape,
    kind: str,
    dtype: torch.dtype,
    threads: int | None = None,
    directory: Path | None = None,
    say: Callable[[str], None] | None = None,
    busy: int | None = None,
) -> Profile:
    """The profile of a rank of a run, or of the master of expert managers.

    Args:
        shape, kind, dtype, threads, busy: See `about_run`.
        directory, say: See `find_profile`.

    Raises:
        UserError: The file is not a profile.
    """
    about = about_run(shape, kind, dtype, mesh.tensor, threads, busy, mesh.expert, mesh.expert_tensor)
    profile = find_profile(shape, about, directory, say)
    return with_managers(profile, shape, mesh.managers) if mesh.managers else profile


def profile_directory() -> Path:
    """Where profiles are kept: `$MEGATRON_MUX_CACHE`, else the user's cache directory."""
    return cache_directory("profiles")


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def save_profile(profile: Profile, directory: Path) -> Path:
    """Write a profile under its key; a half-written file is never seen.

    Raises:
        UserError: It cannot be written.
    """
    path = directory / f"{profile.key}.json"
    try:
        write_atomically(path, json.dumps(asdict(profile)))
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be written: {error.strerror or error}") from error
    return path


def load_profile(about: Mapping[str, Any], directory: Path) -> Profile | None:
    """The profile of exactly this backbone on exactly this device; None if it has not been measured.

    Raises:
        UserError: The file exists and is not a profile.
    """
    path = directory / f"{key_of(about)}.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be read: {error.strerror or error}") from error
    try:
        return _ADAPTER.validate_json(text)
    except ValueError as error:  # pydantic's is one
        raise UserError(f"{path}: is no profile: delete it, or measure anew with --force") from error
