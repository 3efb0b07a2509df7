"""Compiles Triton kernels for GPUs that are not here, and says what ptxas made of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

assert not triton.knobs.runtime.interpret


class Compiled(NamedTuple):
    """What ptxas made of a kernel: registers of a thread, bytes of stack and of shared memory."""

    registers: int
    stack: int
    shared: int
    ptx: str
    ttgir: str


def compile_for(
    arch: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    path: Path,
) -> Compiled:
    """Compile a kernel whose pointers are aligned, and whose sizes and strides are multiples of 16.

    Args:
        types: Of parameters that are neither 32-bit integers nor constants.
        path: Where the binary may be written.
    """
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        specialised = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if name not in constants and specialised and not signature[name].startswith("fp"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, used, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    cubin = path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Compiled(
        int(found[1]), int(found[2]), binary.metadata.shared, binary.asm["ptx"], binary.asm["ttgir"]
    )
