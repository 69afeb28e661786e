"""Bundles: work compiled on one machine, to be timed on another one that compiles nothing.

A bundle is a zip file. ``bundle.json`` says what it was made for and has the SHA-256 of all other
files; nothing is used before both are checked. A bundle of products holds::

    worklist.parquet    the workloads and their configurations
    data/               a dataset without rows: target, protocol and what is known of the binaries
    cache/              the binaries, as Triton's cache has them
    dump/               PTX and SASS, where they were asked for
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel.collect import Job
from costmodel.collect.plan import Plan
from costmodel.collect.sampling import write_worklist
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, CostModelError, InvalidInput, MissingData, MixedData
from costmodel.files import decode, encode, file_errors, replace_file
from costmodel.gemm.specialize import artifact_key, compile_many, specialize
from costmodel.hardware.target import Target

_MANIFEST = "bundle.json"
_SCHEMA = 1
_MOST_BYTES = 2**36


@dataclass(frozen=True)
class Manifest:
    """The content of ``bundle.json``."""

    bundle: int
    kind: Literal["gemm", "kernels"]
    target: dict[str, Any]
    plan: dict[str, Any]
    sha256: dict[str, str]


def write_bundle(
    file: Path,
    jobs: Sequence[Job],
    target: Target,
    protocol: dict[str, Any],
    *,
    n_jobs: int | None = None,
    dump: bool = False,
    known: ArtifactTable | None = None,
) -> Manifest:
    """Compile what jobs need, and write it as a bundle.

    Args:
        n_jobs: compiling processes.
        dump: add PTX and SASS.
        known: binaries of a recording that is to be replayed; nothing is compiled.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = Dataset.create(folder / "data", target, protocol)
        write_worklist(folder / "worklist.parquet", jobs, dataset.identity)
        specs = dict.fromkeys(specialize(j.workload, c) for j in jobs for c in j.configs)
        if known is None:
            dumped = folder / "dump" if dump else None
            artifacts = [
                *compile_many(specs, target, n_jobs=n_jobs, dump=dumped, cache=folder / "cache")
            ]
        else:
            artifacts = [*filter(None, known.find([artifact_key(s, target) for s in specs]))]
        dataset.append_artifacts(artifacts)
        return pack(folder, file, "gemm", target, asdict(Plan.of(jobs, target)))


def pack(
    folder: Path, file: Path, kind: Literal["gemm", "kernels"], target: Target, plan: dict[str, Any]
) -> Manifest:
    """Write the files of a folder as a bundle."""
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    manifest = Manifest(_SCHEMA, kind, target.to_dict(), plan, hashes)

    def write(to: Any) -> None:
        with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, encode(manifest))
            for name, path in paths.items():
                archive.write(path, name)

    with file_errors(file):
        replace_file(file, write)
    return manifest


def unpack(file: Path, folder: Path) -> Manifest:
    """Check a bundle, and write its files to a folder.

    Raises:
        MissingData: no such file. CorruptFile: not a bundle, one of another release, or one with a
            file that leaves the folder, is not listed, or is not what its hash says.
    """
    if not file.is_file():
        raise MissingData(f"no file {file}: `costmodel compile --bundle` writes one")
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if sum(sizes.values()) > _MOST_BYTES:
                raise InvalidInput(f"over {_MOST_BYTES} bytes")
            manifest = decode(archive.read(_MANIFEST), Manifest)
            if manifest.bundle != _SCHEMA:
                raise InvalidInput(f"bundle {manifest.bundle}: this release reads {_SCHEMA}")
            if odd := sizes.keys() ^ {_MANIFEST, *manifest.sha256}:
                raise InvalidInput(f"{min(odd)!r:.80} is listed and missing, or there unlisted")
            for name, digest in manifest.sha256.items():
                path = folder / name
                if not path.resolve().is_relative_to(folder.resolve()) or ".." in path.parts:
                    raise InvalidInput(f"{name!r:.80} leads out of it")
                content = archive.read(name)
                if hashlib.sha256(content).hexdigest() != digest:
                    raise InvalidInput(f"{name!r:.80} is not what its hash says")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    # A zip file may be damaged, encrypted, or packed in ways that Python does not have.
    except (
        zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, ValueError, OSError,
    ) as error:  # fmt: skip
        if isinstance(error, CostModelError) or not isinstance(error, OSError) or not error.errno:
            raise CorruptFile(
                f"{file}: not a bundle to be trusted: {error}: make it again"
            ) from None
        raise
    return manifest


def require_usable(file: Path, made: Target, here: Target, driver_cuda: int) -> None:
    """Refuse a bundle whose binaries this machine would not load, or compile again.

    Args:
        made, here: what it was made for, and this machine.
        driver_cuda: the CUDA version of this machine's driver, such as 12080.

    Raises:
        MixedData: with the reason.
    """
    needed = int(made.toolchain.ptxas.split(".")[0])
    for what, theirs, ours in (
        ("architecture", made.device.capability, here.device.capability),
        ("Triton", made.toolchain.triton, here.toolchain.triton),
        ("ptxas and settings", made.toolchain.ptxas, here.toolchain.ptxas),
        ("driver for CUDA", needed, min(needed, driver_cuda // 1000)),
    ):
        if theirs != ours:
            raise MixedData(
                f"{file} was made for {what} {theirs}, and this machine has {ours}: make it again "
                f"for this machine, or bring this machine to the same"
            )
