"""Work lists: what is to be measured, drawn ahead and kept as a file.

Drawing thousands of workloads and asking a model about each takes minutes, and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from costmodel.collect.collect import Job
from costmodel.data.measurement_table import (
    CONFIG_FIELDS,
    WORKLOAD_FIELDS,
    Role,
    config_of_row,
    workload_fields,
    workload_of_row,
)
from costmodel.data.shards import Identity, arrow_fields, number_rows, read_shards, write_shard
from costmodel.errors import CorruptFile, CostModelError, MissingData
from costmodel.gemm.config import GemmConfig

if TYPE_CHECKING:
    import pyarrow as pa


def by_code(jobs: Sequence[Job]) -> list[Job]:
    """Group the jobs by class of code, the commonest first.

    Jobs of one class share binaries: while the GPU times one class, the next is compiled.
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
        {"job": number, "role": job.role, **job.workload.to_dict(), **config.to_dict()}
        for number, job in enumerate(jobs)
        for config in job.configs
    ]
    write_shard(path, pa.Table.from_pylist(rows, schema=_schema()), identity)


def read_worklist(path: Path, identity: Identity) -> list[Job]:
    """Read the jobs of a file, in their order.

    Raises:
        MissingData: no such file. CorruptFile: not a work list.
        MixedData: drawn for another card, Triton or protocol than ``identity``.
    """
    if not path.is_file():
        raise MissingData(f"no file {path}: `costmodel collect --write-worklist` draws one")
    table = read_shards([path], _schema(), identity)
    job_index, jobs = number_rows(table, ("job", "role", *WORKLOAD_FIELDS))
    config_index, configs = number_rows(table, CONFIG_FIELDS)
    if unknown := {job["role"] for job in jobs} - set(get_args(Role)):
        raise CorruptFile(f"{path}: role {sorted(unknown)}: no release writes that")
    chosen: list[list[GemmConfig]] = [[] for _ in jobs]
    try:
        found = [config_of_row(row) for row in configs]
        for job, config in zip(job_index.tolist(), config_index.tolist(), strict=True):
            chosen[job].append(found[config])
        pairs = zip(jobs, chosen, strict=True)
        return [Job(workload_of_row(row), tuple(part), row["role"]) for row, part in pairs]
    except CostModelError as error:
        raise CorruptFile(f"{path}: {error}: no release writes such a row") from None


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    job = [pa.field("job", pa.int32(), False), pa.field("role", text, False)]
    return pa.schema([*job, *workload_fields(), *arrow_fields(GemmConfig)])
