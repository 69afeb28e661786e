"""Choose what to measure for training: workloads, and configurations of each.

Drawing thousands of workloads and asking a model about each takes minutes, and needs no GPU. So
the result can be kept in a file, the work list.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.random import Generator

from costmodel.arrays import ArrowSchema, Floats
from costmodel.collect import Job, Jobs
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.measurement import Role
from costmodel.data.measurement_table import CONFIG_FIELDS, WORKLOAD_FIELDS, workload_fields
from costmodel.data.rows import number_rows
from costmodel.data.shards import Identity, arrow_fields, read_shards, text_type, write_shard
from costmodel.errors import CorruptFile, CostModelError, InvalidInput, MissingData
from costmodel.evaluation.heldout import is_held_out
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.models.registry import known_artifacts

Sizes = tuple[int, int, int]
"""m, n and k."""

_MAX_BYTES = 2**30
_MAX_FLOPS = 6e11
_TRANSPOSED_SHARE = 0.3
_NEAR = 2.0
_SPREAD = 8
_MS = "1 2 4 8 16 32 48 64 96 128 192 256 384 512 768 1024 1536 2048 3072 4096 6144 8192 16384"
_ROWS = [*map(int, _MS.split())]
# (n, k) of layers of well-known models that are not in the eval list.
_LAYERS = re.findall(
    r"(\d+)x(\d+)",
    """
    5120x5120 15360x5120 13824x5120 5120x13824 3584x3584 4608x3584 18944x3584 3584x18944
    2560x2560 10240x2560 2560x10240 768x768 2304x768 3072x768 768x3072 1280x1280 5120x1280
    1280x5120 1600x1600 6400x1600 1600x6400 8192x8192 10240x8192 57344x8192 8192x28672 3584x8192
    8192x3584 1280x8192 7168x16384 2112x7168 4096x7168 7168x4608 32768x512 32000x4096
    151936x2048 65024x2048 128256x2048 1536x1536 4608x1536 6144x1536 1536x6144 896x896 4864x896
    896x4864 640x640 320x320 1152x4304 4304x1152 1152x1152 96x384 16384x5120
    """,
)


@dataclass
class RandomSampler:
    """Chooses ``count`` configurations, each equally likely."""

    count: int

    def sample(self, space: SearchSpace, rng: Generator) -> list[GemmConfig]:
        size = min(self.count, len(space))
        return [space.configs[i] for i in rng.choice(len(space), size, replace=False)]


@dataclass
class ModelSampler:
    """Chooses what a model ranks first, what its two heads disagree on, and some at random.

    The first kind is drawn from the top of the ranking, which has twice as many as are taken. The
    second kind are those for which the head that sees the compiled artifact and the head that does
    not differ most, among those that either head expects to be at most twice as slow as the best.

    Args:
        model: ranks the space.
        count: how many to choose.
        best: share of ``count`` from the top of the ranking.
        unsure: share of ``count`` that the heads disagree on; a model of one head has none.
    """

    model: CostModel
    count: int
    best: float = 0.4
    unsure: float = 0.1

    def __post_init__(self) -> None:
        if min(self.best, self.unsure) < 0 or self.best + self.unsure > 1:
            raise InvalidInput(
                f"best={self.best:g}, unsure={self.unsure:g}: expected shares of at least 0 that "
                f"add up to at most 1"
            )

    def sample(self, space: SearchSpace, rng: Generator) -> list[GemmConfig]:
        if len(space) <= self.count:
            return list(space.configs)
        costs, disagreement = judge(self.model, space.workload, space.configs, space.target)
        guided = round(self.count * self.best)
        top = np.argsort(costs, kind="stable")[: 2 * guided]
        chosen = rng.choice(top, guided, replace=False)
        left = np.setdiff1d(np.arange(len(space)), chosen)
        disputed = left[np.argsort(-disagreement[left], kind="stable")]
        # Both shares may round up, so the second one is limited to the rest.
        unsure = min(round(self.count * self.unsure), self.count - guided)
        disputed = disputed[disagreement[disputed] > 0][:unsure]
        left = np.setdiff1d(left, disputed)
        rest = rng.choice(left, self.count - len(chosen) - len(disputed), replace=False)
        return [space.configs[i] for i in (*chosen, *disputed, *rest)]


def judge(
    model: CostModel, workload: Workload, configs: Sequence[GemmConfig], target: Target
) -> tuple[Floats, Floats]:
    """Cost of each configuration, and how far the heads' log(cost) differ; float64 [n] each."""
    keys = [artifact_key(specialize(workload, c), target) for c in configs]
    columns, hashes = known_artifacts(model, target).columns(keys)
    bare = Candidates.of(configs)
    full = replace(bare, artifact_columns=columns, ptx_hash=hashes)
    costs = model.predict(workload, full, target)
    if not full.has_artifact.any():  # the model has one head, or one head would answer twice
        return costs, np.zeros(len(costs))
    blind = model.predict(workload, bare, target)
    near = (costs <= _NEAR * costs.min()) | (blind <= _NEAR * blind.min())
    return costs, np.where(near, np.abs(np.log(costs / blind)), 0.0)


def training_workloads(
    count: int, target: Target, dtypes: Sequence[str] = ("float16",), seed: int = 0
) -> list[Workload]:
    """Draw distinct workloads to learn from, none of them held out.

    Four kinds in turn: layers of known models, log-uniform sizes in steps of 16, powers of two and
    their sums, and ragged ones (odd sizes, so that some operand is not aligned). In three of ten
    B is the transpose of a row-major matrix, as the weight of ``nn.Linear`` is.
    Workloads that would take over a millisecond or a gibibyte are left out.

    Args:
        count: how many.
        target: the device, whose memory limits the sizes.
        dtypes: kinds of operands, see :mod:`costmodel.gemm.dtypes`; each is equally likely.
        seed: the same seed gives the same list.
    """
    rng = np.random.default_rng(seed)
    turns = cycle((_layer, _aligned, _ragged, _round, _layer, _ragged, _aligned, _ragged))
    found: dict[Workload, None] = {}
    while len(found) < count:
        m, n, k = next(turns)(rng)
        dtype = str(rng.choice(list(dtypes)))
        options = kind_options(dtype)
        options["b_layout"] = "col" if rng.random() < _TRANSPOSED_SHARE else "row"
        workload = Workload.dense(m, n, k, **options)
        # Tiny products teach little: most of their time is the launch.
        if workload.bytes() < 2**20 and rng.random() < 0.8:
            continue
        most_bytes = min(_MAX_BYTES, target.device.memory_bytes // 16)
        affordable = workload.bytes() <= most_bytes and workload.flops() <= _MAX_FLOPS
        if affordable and not is_held_out(workload):
            found[workload] = None
    return list(found)


def _log_uniform(rng: Generator, low: float, high: float, step: int = 1) -> int:
    return max(int(np.exp(rng.uniform(np.log(low), np.log(high)))) // step, 1) * step


def _layer(rng: Generator) -> Sizes:
    n, k = map(int, _LAYERS[rng.integers(len(_LAYERS))])
    return int(rng.choice(_ROWS)), n, k


def _aligned(rng: Generator) -> Sizes:
    """Draw any m; n and k in steps of 16."""
    m = int(rng.choice(_ROWS)) if rng.random() < 0.5 else _log_uniform(rng, 1, 16384)
    low = 16 if rng.random() < 0.2 else 256
    return m, _log_uniform(rng, low, 131072, 16), _log_uniform(rng, low, 131072, 16)


def _round(rng: Generator) -> Sizes:
    """Draw powers of two and sums of two neighbours."""

    def size() -> int:
        power = 2 ** int(rng.integers(7, 16))
        return power * 3 // 2 if rng.random() < 0.5 else power

    return 2 ** int(rng.integers(0, 15)), size(), size()


def _ragged(rng: Generator) -> Sizes:
    """Draw sizes that leave operands unaligned, in ways that occur in practice."""

    def odd(low: int, high: int) -> int:
        return _log_uniform(rng, low, high) | 1

    def even(high: int) -> int:
        return _log_uniform(rng, 64, high, 64)

    m = _log_uniform(rng, 1, 16384)
    match rng.integers(4):
        case 0:  # everything
            return m, odd(16, 16384), odd(16, 8192)
        case 1:  # a vocabulary: n odd, k even
            return m, odd(1024, 65536), even(8192)
        case 2:  # a first layer: k odd and short, n even
            return m, even(8192), odd(17, 2048)
        case _:  # multiples of 8, but not of 16
            return m, even(8192) + 8, even(4096) + 8


# --- Work lists -----------------------------------------------------------------------------------


def by_code(jobs: Jobs) -> list[Job]:
    """Group the jobs by code class, the most frequent class first.

    Jobs of one class share binaries: while the GPU times one class, the next is compiled.
    """
    counts = Counter(job.workload.code for job in jobs)
    rank = {code: i for i, (code, _) in enumerate(counts.most_common())}
    return sorted(jobs, key=lambda job: rank[job.workload.code])


def by_doubt(jobs: Jobs, model: CostModel, target: Target) -> list[Job]:
    """Order jobs for a budget that may not be enough for all.

    First come workloads outside the model's coverage, then those on which its heads disagree most.
    If no model was learned, each eighth of the list is spread over kinds and sizes.
    """

    ordered = sorted(jobs, key=lambda job: (str(job.workload.code), job.workload.flops()))
    spread = [job for i in range(_SPREAD) for job in ordered[i::_SPREAD]]
    if model.kind != "learned":
        return spread
    return sorted(
        spread,
        key=lambda job: (
            bool(model.out_of_coverage(job.workload)),
            judge(model, job.workload, job.configs, target)[1].mean(),
        ),
        reverse=True,
    )


def write_worklist(path: Path, jobs: Jobs, identity: Identity) -> None:
    """Write jobs, one row for each configuration, for the target and protocol of ``identity``.

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
        workloads = [Workload.from_dict({n: row[n] for n in WORKLOAD_FIELDS}) for row in jobs]
        found = [*map(GemmConfig.from_dict, configs)]
    except CostModelError as error:
        raise CorruptFile(f"{path}: {error}: no release writes such a row") from None
    for job, config in zip(job_index.tolist(), config_index.tolist()):
        chosen[job].append(found[config])
    drawn = zip(workloads, chosen, jobs)
    return [Job(workload, tuple(part), row["role"]) for workload, part, row in drawn]


def _schema() -> ArrowSchema:
    import pyarrow as pa

    job = [pa.field("job", pa.int32(), False), pa.field("role", text_type(), False)]
    return pa.schema([*job, *workload_fields(), *arrow_fields(GemmConfig)])
