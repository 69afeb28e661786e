"""``costmodel compile``: binaries of a product's space, without a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from costmodel.cli.common import AsJson, TargetName, answer, find_target, product_or_none, takes
from costmodel.errors import InvalidInput
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

_COLUMNS = ("config", "status", "registers", "spill_bytes", "shared_bytes", "compile_s",
            "error")  # fmt: skip
_FIELDS = ("key", "status", "registers", "spill_bytes", "shared_bytes", "ptx_hash", "error")


@takes("workload", product_or_none)
def compile_space(
    workload: Workload | None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Write what `costmodel collect --bundle` times to this file."),
    ] = None,
    worklist: Annotated[
        Path | None, typer.Option(help="Of --bundle: a work list, in place of M N K.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="Of --bundle: FILE.py:FUNCTION that calls a kernel of yours.")
    ] = "",
    target: TargetName = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many binaries.")] = 64,
    dump: Annotated[
        Path | None, typer.Option(help="Write the PTX, SASS and JSON of each to this folder.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile configurations of a product's space; needs no GPU."""
    from costmodel.collect import Job
    from costmodel.data.shards import require_folder
    from costmodel.gemm.space import SearchSpace
    from costmodel.gemm.specialize import compile_many, specialize

    if dump is not None:
        require_folder(dump)
    found = find_target(target)
    if bundle is not None and workload is None:
        _bundle(bundle, worklist or kernel, [], found, dump, jobs, as_json)
        return
    if workload is None or worklist or kernel:
        raise typer.BadParameter("expected M N K; or --bundle, with --worklist or --kernel")
    space = SearchSpace.of(workload, found)
    what = f"{workload} on {found.device.name}"
    if not len(space):
        raise InvalidInput(f"no configuration to compile for {what}: expected smaller sizes")
    by_spec = {specialize(workload, config): config for config in reversed(space.configs)}
    # Spread over the space, not its first corner.
    specs = list(by_spec)[:: -(-len(by_spec) // limit)]
    if bundle is not None:
        job = Job(workload, tuple(by_spec[spec] for spec in specs))
        _bundle(bundle, None, [job], found, dump, jobs, as_json)
        return
    begin = time.perf_counter()
    artifacts = list(compile_many(specs, found, n_jobs=jobs, dump=dump))
    rows = [_row(by_spec[artifact.spec], artifact) for artifact in artifacts]
    failed = sum(not artifact.ok for artifact in artifacts)
    counts = {"space": len(space), "binaries": len(by_spec), "compiled": len(rows) - failed,
              "failed": failed, "seconds": round(time.perf_counter() - begin, 3)}  # fmt: skip
    took = f"in {counts['seconds']:.1f} s" + (f"; see {dump}" if dump else "")
    answer(
        as_json,
        {"workload": workload.to_dict(), "target": found.to_dict(), **counts, "artifacts": rows},
        (f"{what}: {len(rows)} of {len(by_spec)} binaries", _COLUMNS,
         [[row[name] or "" for name in _COLUMNS] for row in rows]),
        notes=[f"{len(rows) - failed} compiled, {failed} failed, {took}"],
    )  # fmt: skip


def _row(config: object, artifact: Any) -> dict[str, Any]:
    fields = {name: getattr(artifact, name) for name in _FIELDS}
    return {"config": str(config), **fields, "compile_s": round(artifact.compile_s, 3)}


def _bundle(
    file: Path, work: Path | str | None, todo: list[Any], target: Target, dump: Path | None,
    jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a bundle of a work list (a path), a function's calls (a text) or these jobs."""
    from costmodel.autotune.bundle import write_kernel_bundle
    from costmodel.collect.bundle import write_bundle
    from costmodel.collect.sampling import read_worklist
    from costmodel.data.shards import Identity, require_file_place
    from costmodel.measure.protocol import TimingProtocol

    require_file_place(file)
    if isinstance(work, str):
        with TemporaryDirectory() as folder:
            planned = write_kernel_bundle(file, work, target, Path(folder))
    else:
        protocol = TimingProtocol().to_dict()
        todo = todo or read_worklist(work or Path(), Identity(target, protocol))
        planned = write_bundle(file, todo, target, protocol, n_jobs=jobs, dump=dump)
    answer(as_json, planned, (f"in {file}", ["what", "how much"], planned.items()))
