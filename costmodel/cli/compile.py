"""``costmodel compile``: binaries of a product's space, without a GPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from typer import BadParameter, Exit, Option

from costmodel.cli.common import (
    AsJson,
    OptionalPath,
    TargetName,
    answer,
    find_target,
    in_units,
    product_or_none,
    takes,
)
from costmodel.cli.waiting import doing
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol

_COLUMNS = "config status registers spill_bytes shared_bytes compile_s error"
_FIELDS = "key status registers spill_bytes shared_bytes ptx_hash error"


@takes("workload", product_or_none)
def compile_space(
    workload: Workload | None,
    bundle: Annotated[
        OptionalPath, Option(help="Write a bundle for `costmodel collect --bundle` to this file.")
    ] = None,
    worklist: Annotated[
        OptionalPath, Option(help="With --bundle: a work list instead of M N K.")
    ] = None,
    kernel: Annotated[
        str, Option(help="With --bundle: FILE.py:FUNCTION, which calls your kernel.")
    ] = "",
    config: Annotated[
        str | None, Option(help='Only this configuration, such as "tma 128x256x64 w8 s4 g8".')
    ] = None,
    target: TargetName = None,
    limit: Annotated[int, Option(min=1, help="At most this many, spread over the space.")] = 64,
    dump: Annotated[
        OptionalPath, Option(help="Write PTX, SASS and a JSON of each binary to this folder.")
    ] = None,
    jobs: Annotated[int | None, Option(min=1, help="Processes; default: all cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile configurations of a product, or a bundle of work; needs no GPU."""
    from costmodel.collect import Job
    from costmodel.data.shards import require_folder
    from costmodel.gemm.specialize import compile_many, specialize

    if dump is not None:
        require_folder(dump)
    found = find_target(target)
    is_one = sum(map(bool, (workload or config, worklist, kernel))) == 1
    if is_one and bundle is not None and workload is None:
        _bundle(bundle, worklist or kernel, [], found, dump, jobs, as_json)
        return
    if not is_one or workload is None:
        raise BadParameter("expected M N K; or --bundle, with --worklist or --kernel")
    configs = _configs(workload, found, config)
    by_spec = {specialize(workload, config): config for config in reversed(configs)}
    specs = list(by_spec)[:: -(-len(by_spec) // limit)]  # spread over the space
    if bundle is not None:
        job = Job(workload, tuple(by_spec[spec] for spec in specs))
        _bundle(bundle, None, [job], found, dump, jobs, as_json)
        return
    begin, columns, rows = time.perf_counter(), _COLUMNS.split(), list[Any]()
    for artifact in compile_many(specs, found, n_jobs=jobs, dump=dump):
        row = {"config": str(by_spec[artifact.spec])}
        row |= {name: getattr(artifact, name) for name in _FIELDS.split()}
        rows.append(row | {"compile_s": round(artifact.compile_s, 3)})
        doing(f"compiled {len(rows)} of {len(specs)}")
    failed = sum(row["status"] != "ok" for row in rows)
    counts = {"space": len(configs), "binaries": len(by_spec), "compiled": len(rows) - failed,
              "failed": failed, "seconds": round(time.perf_counter() - begin, 3)}  # fmt: skip
    took = f"in {counts['seconds']:.1f} s" + (f"; see {dump}" if dump else "")
    answer(
        as_json,
        {"workload": workload.to_dict(), "target": found.to_dict(), **counts, "artifacts": rows},
        (f"{workload} on {found.device.name}: {len(rows)} of {len(by_spec)} binaries", columns,
         [[row[name] or "" for name in columns] for row in rows]),
        notes=[f"{len(rows) - failed} compiled, {failed} failed, {took}"],
    )  # fmt: skip


def _configs(workload: Workload, target: Target, name: str | None) -> Sequence[GemmConfig]:
    """Return the space of a product, or the one configuration of it that is named."""
    from costmodel.gemm.space import SearchSpace, why_illegal

    if name is None:
        if configs := SearchSpace.of(workload, target).configs:
            return configs
        raise InvalidInput(
            f"no configuration to compile for {workload} on {target.device.name}: expected "
            f"smaller sizes"
        )
    config = parse_config(name)
    if reason := why_illegal(config, workload, target.device):
        raise InvalidInput(f"--config {config}: {reason}; `costmodel rank` lists what can run")
    return (config,)


def _bundle(
    file: Path, work: Path | str | None, todo: list[Any], target: Target, dump: OptionalPath,
    jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a bundle of a work list (a path), a function's calls (a text) or these jobs."""
    from costmodel.autotune.bundle import write_kernel_bundle
    from costmodel.collect.bundle import write_bundle
    from costmodel.collect.sampling import read_worklist
    from costmodel.data.shards import Identity, require_file_place

    require_file_place(file)
    if isinstance(work, str):
        with TemporaryDirectory() as folder:
            planned = write_kernel_bundle(file, work, target, Path(folder), dump)
    else:
        protocol = TimingProtocol().to_dict()
        todo = todo or read_worklist(work or Path(), Identity(target, protocol))
        planned = write_bundle(file, todo, target, protocol, n_jobs=jobs, dump=dump)
    unusable = planned["failed"] == planned["binaries"]
    estimated = "; estimates of collecting it" if not isinstance(work, str) else ""
    title = f"nothing compiles: no {file}" if unusable else f"in {file}{estimated}"
    answer(as_json, planned, (title, ["what", "how much"], in_units(planned)))
    if unusable:
        if todo:  # of products a file was written
            file.unlink()
        raise Exit(1)
