"""Bundles: work compiled on one machine, to be timed on another one that compiles nothing.

A bundle is a zip file. ``bundle.json`` says which target it was made for, and has the SHA-256 of
all other files; nothing is used before both are checked. A bundle of products holds::

    worklist.parquet    the workloads and their configurations
    data/               a dataset without timings: target, protocol, and artifacts of the binaries
    cache/              the binaries, in the form of Triton's cache
    dump/               PTX and SASS, if they were asked for
"""

import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel.collect import Jobs
from costmodel.collect.parts import plan
from costmodel.collect.sampling import write_worklist
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, InvalidInput, MissingData, MixedData
from costmodel.files import Named, decode, digest, encode, file_errors, make_folder, replace_file
from costmodel.gemm.specialize import artifact_key, compile_many, specialize
from costmodel.hardware.target import Target

_MANIFEST = "bundle.json"
_MOST_BYTES = 2**36
_UNUSED = {".source", ".ttir", ".ttgir", ".llir"}  # steps on the way to a binary


@dataclass(frozen=True)
class Manifest:
    """The content of ``bundle.json``."""

    bundle: Literal[1]
    target: Named
    plan: Named
    sha256: dict[str, str]


def write_bundle(
    file: Path,
    jobs: Jobs,
    target: Target,
    protocol: Named,
    *,
    n_jobs: int | None = None,
    dump: Path | None = None,
    known: ArtifactTable | None = None,
) -> Named:
    """Compile what jobs need, and write it as a bundle; return the plan, and how many failed.

    Args:
        n_jobs: compiling processes.
        dump: a folder for PTX and SASS; the bundle gets a copy.
        known: binaries of a recording that will be replayed; then nothing is compiled.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = Dataset.create(folder / "data", target, protocol)
        write_worklist(folder / "worklist.parquet", jobs, dataset.identity)
        specs = dict.fromkeys(specialize(j.workload, c) for j in jobs for c in j.configs)
        if known is None:
            artifacts = [
                *compile_many(specs, target, n_jobs=n_jobs, dump=dump, cache=folder / "cache")
            ]
        else:
            artifacts = [*filter(None, known.find([artifact_key(s, target) for s in specs]))]
        dataset.append_artifacts(artifacts)
        failed = sum(not artifact.ok for artifact in artifacts)
        return pack(folder, file, target, plan(jobs, target) | {"failed": failed}, dump)


def pack(
    folder: Path, file: Path, target: Target, planned: Named, dump: Path | None = None
) -> Named:
    """Write the files of a folder as a bundle; return the plan."""
    if dump is not None:
        shutil.copytree(dump, folder / "dump")
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix not in _UNUSED)
    paths = {str(path.relative_to(folder)): path for path in files}
    hashes = {name: digest(path.read_bytes(), 64) for name, path in paths.items()}
    manifest = Manifest(1, target.to_dict(), planned, hashes)

    def write(to: Any) -> None:
        with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, encode(manifest))
            for name, path in paths.items():
                archive.write(path, name)

    with file_errors(file):
        replace_file(file, write)
    return planned


def unpack(file: Path, folder: Path) -> Manifest:
    """Check a bundle, and write its files to a folder.

    Raises:
        MissingData: no such file. CorruptFile: not a bundle, or of another release; or a file in it
            leads out of the folder, is not listed, or does not fit its hash.
    """
    if not file.is_file():
        raise MissingData(f"no file {file}: `costmodel compile --bundle` writes one")
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if sum(sizes.values()) > _MOST_BYTES:
                raise InvalidInput(f"over {_MOST_BYTES} bytes")
            manifest = decode(archive.read(_MANIFEST), Manifest)
            if odd := sizes.keys() ^ {_MANIFEST, *manifest.sha256}:
                raise InvalidInput(f"{min(odd)!r:.80} is listed and missing, or there unlisted")
            for name, told in manifest.sha256.items():
                path = folder / name
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise InvalidInput(f"{name!r:.80} leads out of it")
                content = archive.read(name)
                if digest(content, 64) != told:
                    raise InvalidInput(f"{name!r:.80} is not what its hash says")
                make_folder(path.parent)
                if path.name.startswith("__grp__"):  # Triton's list of files has their old paths
                    names = decode(content, dict[str, dict[str, str]])["child_paths"]
                    content = encode({"child_paths": {x: str(path.parent / x) for x in names}})
                path.write_bytes(content)
    except Exception as error:  # a zip file may be damaged in many ways
        raise CorruptFile(
            f"{file}: not a bundle that can be used: {error}: make it again with `costmodel "
            f"compile --bundle`"
        ) from None
    return manifest


def require_usable(file: Path, made: Target, here: Target, driver_cuda: int) -> None:
    """Refuse a bundle whose binaries this machine would not load, or would compile again.

    Args:
        made, here: the target that it was made for, and that of this machine.
        driver_cuda: the CUDA version of this machine's driver, such as 12080.

    Raises:
        MixedData: gives the reason.
    """
    needed = int(made.toolchain.ptxas.split(".")[0])
    theirs = made.device.capability, made.toolchain, needed
    ours = here.device.capability, here.toolchain, min(needed, driver_cuda // 1000)
    if theirs != ours:
        raise MixedData(
            f"{file} was made for {theirs}, and this machine has {ours} (architecture, compiler, "
            f"CUDA of the driver): make it again with the same versions, for this machine"
        )
