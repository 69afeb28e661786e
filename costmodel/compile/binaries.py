"""Where Triton's cache has a binary, remembered, so that Triton need not be asked.

To find what it compiled before, Triton wants the kernel's source, which takes it a tenth of a
second to read and to hash. What is in its cache is taken from there directly while nothing that it
rests on has changed, and only if it is still what it was, byte for byte. Else Triton compiles it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from costmodel.compile.launchers import build_launchers
from costmodel.compile.triton_key import know_triton_key, triton_files
from costmodel.errors import CompileError
from costmodel.files import cached_fact
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from triton.compiler import ASTSource, CompiledKernel

__all__ = ["MakeSource", "compiled", "recalled"]

MakeSource = Callable[[], "tuple[ASTSource, dict[str, Any]]"]
"""Gives the Triton source and compile options of a binary; imports its kernel."""

# Of these begin the names of the variables that Triton, LLVM and ptxas look at.
_VARIABLES = ("TRITON", "PTXAS", "LLVM", "MLIR", "DISABLE", "USE_", "NVPTX", "AMDGCN", "ENABLE")
# What makes the source and the options of a specialization.
_SPACE = Path(__file__).parents[1] / "gemm"
_OWN = ("specialize.py", "config.py", "code_class.py")

log = logging.getLogger("costmodel")


def compiled(make_source: MakeSource, name: object, target: Target) -> CompiledKernel:
    """Compile, or find in Triton's cache.

    Args:
        name: for messages.

    Raises:
        CompileError: Triton or ptxas refused.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    know_triton_key()
    source, options = make_source()
    gpu = GPUTarget("cuda", target.device.arch, 32)
    launcher = build_launchers([source])
    try:
        kernel = triton.compile(source, target=gpu, options=options)
        launcher.result()
        return kernel
    except (CompilationError, PTXASError) as error:
        raise CompileError(f"{name} does not compile: {str(error)[:500]}") from None


def recalled(key: str, make_source: MakeSource, name: object, target: Target) -> CompiledKernel:
    """As :func:`compiled`; in a later process without a look at the kernel.

    Args:
        key: the identity of the binary, such as :func:`costmodel.gemm.specialize.artifact_key`.
    """
    if not _plain_triton():
        return compiled(make_source, name, target)
    files = [*triton_files(), *(_SPACE / file for file in _OWN)]
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    digest = hashlib.sha256(f"{key}\n{settings}".encode()).hexdigest()[:20]
    now: list[CompiledKernel] = []

    def work_out() -> dict[str, str]:
        now.append(compiled(make_source, name, target))
        return _description(now[0])

    found = cached_fact(f"binary-{digest}", files, work_out)
    return now[0] if now else _from_cache(found) or compiled(make_source, name, target)


def _plain_triton() -> bool:
    """Whether Triton is to take binaries from its cache, and nobody looks on."""
    from triton import knobs

    setting = knobs.compilation
    special = (setting.always_compile, setting.override, setting.dump_ir, setting.listener)
    return not any(special) and not knobs.cache.manager_class


def _description(kernel: CompiledKernel) -> dict[str, str]:
    """Where a binary is, and what Triton's launcher asks of its source."""
    paths = {Path(path).suffix: str(path) for path in kernel.metadata_group.values()}
    metadata, cubin = paths[".json"], paths[".cubin"]
    return {
        "hash": str(kernel.hash),
        "metadata": metadata,
        "cubin": cubin,
        "content": _content(metadata, cubin),
        "arguments": json.dumps(list(kernel.src.fn.arg_names)),
        "signature": json.dumps(dict(kernel.src.signature)),
    }


def _content(*paths: str) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def _from_cache(found: dict[str, str]) -> CompiledKernel | None:
    """The binary, as Triton itself would have read it; None where anything is not as it was."""
    from triton import knobs
    from triton.compiler import CompiledKernel

    try:
        metadata, cubin = found["metadata"], found["cubin"]
        folder = Path(knobs.cache.dir)
        if {Path(metadata).parent.parent, Path(cubin).parent.parent} != {folder}:
            return None
        if _content(metadata, cubin) != found["content"]:
            return None
        source = SimpleNamespace(
            constants={},
            signature=json.loads(found["signature"]),
            fn=SimpleNamespace(arg_names=json.loads(found["arguments"]), launch_metadata=None),
        )
        group = {Path(path).name: path for path in (metadata, cubin)}
        return CompiledKernel(source, group, found["hash"])
    except Exception as error:  # another Triton's cache, perhaps: Triton itself knows
        log.debug("not taken from Triton's cache: %s: %.200s", type(error).__name__, error)
        return None
