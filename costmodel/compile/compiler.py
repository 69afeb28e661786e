"""From a Triton source to an artifact: its binary, and the features of its PTX. Needs no GPU.

:func:`compile_source` compiles in this process; :mod:`costmodel.compile.compile_pool` does so in
child processes, which may die of it.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from costmodel.compile.ptx import extract, ptx_hash
from costmodel.compile.triton_private import MakeSource
from costmodel.hardware.architectures import architecture

ArtifactStatus = Literal["ok", "compile_error", "crashed", "timeout"]

# The other failures may not happen again.
_WEIGHTS = {"ok": 2, "compile_error": 1}


@dataclass(frozen=True)
class Artifact:
    """One compiled binary.

    Attributes:
        key: its identity: its source, and the compiler that made it.
        spec: the caller's description of the source.
        status: ``ok``, or how compiling failed; then ``error`` says why and the rest is empty.
        registers: 32-bit registers per thread of the binary (``cuobjdump``).
        spill_bytes: stack frame of a thread, which in these kernels holds spills only; this is
            costmodel's only definition of a spill.
        shared_bytes: shared memory of a block, static and dynamic.
        ptx_hash: hash of the PTX without debug information: equal hashes are the same program.
        ptx: the counts of :data:`costmodel.compile.ptx.PTX_FEATURES`, by name.
        compile_s: wall seconds.
    """

    key: str
    spec: Any
    status: ArtifactStatus = "ok"
    error: str = ""
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    ptx_hash: str = ""
    ptx: Mapping[str, float] = field(default_factory=dict)
    compile_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def outweighs(status: ArtifactStatus, other: ArtifactStatus) -> bool:
    """Return True if an artifact of this status replaces an earlier one of the same key."""
    return _WEIGHTS.get(status, 0) > _WEIGHTS.get(other, 0)


_ERROR_LIMIT = 500
# How Triton's PTXASError tells that a signal ended ptxas.
_KILLED = re.compile(r"`ptxas` (failed with error code -\d|raised SIG)")


def compile_source(
    make_source: MakeSource,
    arch: int,
    key: str,
    spec: Any,
    dump: Path | None = None,
    *,
    anew: bool = False,
) -> Artifact:
    """Compile a Triton source in this process, with Triton's own disk cache.

    A source that Triton or ptxas refuses gives an artifact of status ``compile_error``; if ptxas
    was killed, perhaps because memory ran out, the status is ``crashed``.
    These exceptions of ``triton.compile`` count as refusals; all others propagate:

    - ``CompilationError``: the kernel's source, or a ``static_assert`` in it;
    - ``PTXASError``: for example, a ``maxnreg`` that is too small for a wgmma;
    - ``OutOfResources``: shared or tensor memory;
    - ``ValueError``, ``AssertionError``: options that the backend checks, such as ``num_warps``;
    - ``RuntimeError("PassManager::run failed")``: a pass of MLIR gave up.

    Args:
        make_source: returns the source and the compile options, such as ``num_warps``.
        arch: compute capability of the target, times ten.
        key, spec: of the artifact.
        dump: a folder for ``KEY.ptx``, ``KEY.sass`` and ``KEY.json``, made if missing.
        anew: compile even if Triton's cache has the binary.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    refusals = (CompilationError, PTXASError, OutOfResources, ValueError, AssertionError)
    start = time.perf_counter()
    try:
        compiled = _compiled(*make_source(), arch, anew)
    except (*refusals, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PassManager::run failed" not in str(error):
            raise
        status: ArtifactStatus = "crashed" if _KILLED.search(str(error)) else "compile_error"
        artifact = Artifact(key, spec, status, reason(error))
    else:
        artifact = describe(key, spec, arch, compiled)
    artifact = replace(artifact, compile_s=time.perf_counter() - start)
    if dump is not None:
        _dump(dump, artifact, compiled.asm if artifact.ok else None)
    return artifact


def _compiled(source: Any, options: Mapping[str, Any], arch: int, anew: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    setting, gpu = triton.knobs.compilation, GPUTarget("cuda", arch, 32)
    with setting.scope():
        setting.always_compile |= anew
        setting.store_binary_only = False  # features need the PTX
        compiled = triton.compile(source, target=gpu, options=options)
        if "ptx" not in compiled.asm:  # the cache has the binary only
            setting.always_compile = True
            compiled = triton.compile(source, target=gpu, options=options)
        return compiled


def describe(key: str, spec: Any, arch: int, compiled: Any) -> Artifact:
    """Describe a ``triton.compiler.CompiledKernel``."""
    metadata, ptx, cubin = compiled.metadata, compiled.asm["ptx"], compiled.asm["cubin"]
    usage = _resource_usage(cubin, metadata.name)
    row = architecture(arch)
    reserved = row.reserved_shared_bytes if row.ptxas_counts_reserved else 0
    return Artifact(
        key,
        spec,
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=metadata.shared + max(usage["SHARED"] - reserved, 0),
        ptx_hash=ptx_hash(ptx),
        ptx=extract(ptx),
    )


def _resource_usage(cubin: bytes, entry: str) -> dict[str, int]:
    """Return what ptxas gave a function: REG, STACK, SHARED (static), LOCAL; sizes in bytes."""
    text = _cuobjdump("--dump-resource-usage", cubin)
    match = re.search(rf"Function {re.escape(entry)}:\s*\n(.*)", text)
    usage = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", match[1])} if match else {}
    if not {"REG", "STACK", "SHARED"} <= set(usage):
        raise RuntimeError(
            f"cuobjdump --dump-resource-usage: expected REG, STACK and SHARED of {entry}, found "
            f"{text[:_ERROR_LIMIT]!r}; this Triton's cuobjdump is not known to costmodel"
        )
    return usage


def _cuobjdump(option: str, cubin: bytes) -> str:
    """Return what the cuobjdump in Triton's wheel prints about a binary."""
    from triton import knobs

    path = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, option, file.name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout


def _dump(folder: Path, artifact: Artifact, asm: Mapping[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    row = asdict(replace(artifact, ptx={}))
    (folder / f"{artifact.key}.json").write_text(json.dumps(row, indent=1) + "\n")
    if asm is not None:
        sass = _cuobjdump("-sass", asm["cubin"])
        (folder / f"{artifact.key}.ptx").write_text(asm["ptx"])
        (folder / f"{artifact.key}.sass").write_text(sass)


def reason(error: BaseException) -> str:
    """Say what was wrong in a line or two, without source, PTX or names of temporary files."""
    while error.__cause__ is not None:  # Triton wraps once for every call on the way
        error = error.__cause__
    text = str(error)
    if fatal := re.findall(r"^ptxas.*?(?:fatal|error) *: *(.*)$", text, re.MULTILINE):
        text = f"ptxas: {fatal[0]}"
    elif excerpt := re.split(r"\n *\^(?:\n|$)", text)[:-1]:
        # The source up to the statement and a caret under it, then the message, if any.
        statement = excerpt[-1].rsplit("\n", 1)[-1].strip()
        text = f"{statement}: {text.rsplit('^', 1)[-1].strip()}".removesuffix(": ")
    return shorten(f"{type(error).__name__}: {text.split('Repro command:')[0].strip()}")


def shorten(text: str) -> str:
    """Cut an error's text to the length that artifacts keep."""
    return text if len(text) <= _ERROR_LIMIT else text[: _ERROR_LIMIT - 1] + "…"
