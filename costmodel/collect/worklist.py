"""What is to be measured, drawn ahead and kept as a file: on the GPU no time goes into choosing.

Drawing thousands of workloads and asking a model about each takes minutes, and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from costmodel.collect.collect import Job
from costmodel.data.measurement_table import Role, config_of_row, workload_of_row
from costmodel.data.shards import Identity, arrow_fields, read_shards, write_shard
from costmodel.errors import CorruptFile, CostModelError, InvalidInput, MissingData
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import CodeClass, Workload

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["by_code", "read_worklist", "write_worklist"]


def by_code(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with those of one class of code in a row, the commonest class first.

    They share their binaries: while the GPU times the first class, those of the next are compiled.
    """
    counts = Counter(job.workload.code for job in jobs)
    rank = {code: i for i, (code, _) in enumerate(counts.most_common())}
    return sorted(jobs, key=lambda job: rank[job.workload.code])


def write_worklist(path: Path, jobs: Sequence[Job], identity: Identity) -> None:
    """Write jobs, one row for each configuration, for the card and protocol of ``identity``.

    Raises:
        FileError: it cannot be written.
    """
    import pyarrow as pa

    rows = [
        {
            "job": number, "role": job.role,
            **job.workload.to_dict(), **config.to_dict(),
        }
        for number, job in enumerate(jobs)
        for config in job.configs
    ]  # fmt: skip
    write_shard(path, pa.Table.from_pylist(rows, schema=_schema()), identity)


def read_worklist(path: Path, identity: Identity) -> list[Job]:
    """The jobs of a file, in their order.

    Raises:
        MissingData: no such file. CorruptFile: not a list of work.
        MixedData: drawn for another card, Triton or protocol than ``identity``.
    """
    if not path.is_file():
        raise MissingData(f"no file {path}: `costmodel collect --write-worklist` draws one")
    rows = read_shards([path], _schema(), identity).to_pylist()
    jobs: dict[int, tuple[Workload, Role, list[GemmConfig]]] = {}
    configs: dict[tuple[Any, ...], GemmConfig] = {}
    try:
        for row in rows:
            if row["job"] not in jobs:
                jobs[row["job"]] = workload_of_row(row), _role(row), []
            values = tuple(row[name] for name in _CONFIG)
            if values not in configs:
                configs[values] = config_of_row(row)
            jobs[row["job"]][2].append(configs[values])
    except CostModelError as error:
        raise CorruptFile(f"{path}: {error}: no release writes such a row") from None
    return [Job(workload, tuple(found), role) for workload, role, found in jobs.values()]


_CONFIG = tuple(f.name for f in fields(GemmConfig))


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("job", pa.int32(), False),
            pa.field("role", text, False),
            *(pa.field(name, pa.int32(), False) for name in ("m", "n", "k")),
            *arrow_fields(CodeClass),
            *arrow_fields(GemmConfig),
        ]
    )


def _role(row: dict[str, Any]) -> Role:
    if row["role"] not in get_args(Role):
        raise InvalidInput(f"role {row['role']!r}: expected one of {', '.join(get_args(Role))}")
    role: Role = row["role"]
    return role
