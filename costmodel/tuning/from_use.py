"""Learning from use: what the tuner has timed on this machine, as rows to train on.

Winners are kept on disk with every timing that led to them. Those of the same device, toolchain and
timing protocol as a dataset, with kernels that have not changed, are as good as its own rows. A
cache may hold anything: an entry that does not fit is left out, and counted by its reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement
from costmodel.errors import FileError, MissingData, ModelError
from costmodel.evaluation.heldout import HELD_OUT, is_held_out
from costmodel.files import Named, file_errors
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import artifact_key, kernel_hash, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.registry import model_directory
from costmodel.models.storage import read_artifacts, read_card
from costmodel.models.table import TrainingTable
from costmodel.tuning.winner_cache import CacheEntry, WinnerCache
from costmodel.validation import as_path

UNREADABLE = "file that is no entry"
_DEVICE = ("product", "arch", "sm_count")
# The fields of a timing protocol that change a latency; tolerances and limits do not.
_PROTOCOL = "version cache repeats replay_us max_launches idle idle_from_us"
# A time below half the roofline of the data sheet, or over the limit of a timing, cannot be right.
_LEAST_ROOFLINES, _LONGEST_US = 0.5, 60e6


def open_cache(directory: str | Path | None = None) -> WinnerCache:
    """The cache of this directory; default: the one that tuning uses, which may not exist yet.

    Raises:
        MissingData: a directory was named, and it does not exist.
    """
    if directory is None:
        return WinnerCache()
    path = as_path("the cache", directory)
    with file_errors(path):
        if not path.is_dir():
            raise MissingData(
                f"no cache of winners at {path}: expected a directory; `costmodel cache` says "
                f"where tuning keeps its own"
            )
    return WinnerCache(path)


def with_use(dataset: Dataset, cache: WinnerCache) -> tuple[TrainingTable, Named]:
    """Return the training rows of a dataset, and after them those that use has added.

    A row that both have is taken from the dataset.

    Returns:
        (table, card): the card says how many ``rows`` of how many ``workloads`` were added, for
        how many of the rows no binary is known (``without_artifact``), and what was ``dropped``.
    """
    table = TrainingTable.from_dataset(dataset)
    latency_us, torch_us, dropped = used_rows(cache, dataset.target, dataset.protocol)
    index = table.workload_index.tolist()
    for number, config in zip(index, table.candidates.configs):
        if latency_us.pop((table.workloads[number], config), None) is not None:
            dropped["in the data set already"] += 1
    keys = [artifact_key(specialize(*pair), dataset.target) for pair in latency_us]
    artifacts = _artifacts(dataset, keys)
    new = list(dict.fromkeys(workload for workload, _ in latency_us))
    card = {
        "rows": len(latency_us),
        "workloads": len(new),
        "without_artifact": sum(a is None for a in artifacts),
        "dropped": dict(sorted(dropped.items())),
    }
    # For the other workloads, only the cache may have a time of torch.
    workloads = tuple(dict.fromkeys((*new, *table.workloads)))
    index = {workload: i for i, workload in enumerate(workloads)}
    used = TrainingTable(
        workloads=workloads,
        workload_index=np.array([index[w] for w, _ in latency_us], dtype=np.intp),
        latency_us=np.array([*latency_us.values()], dtype=np.float64),
        status=np.full(len(latency_us), "ok", dtype=object),
        candidates=Candidates.of([config for _, config in latency_us], artifacts),
        target=table.target,
        torch_us=tuple(torch_us.get(workload, np.nan) for workload in workloads),
    )
    return TrainingTable.joined([table, used]), card


def _artifacts(dataset: Dataset, keys: Sequence[str]) -> list[Artifact | None]:
    """Return the artifacts of these keys, from the dataset or else from the shipped model."""
    found = dataset.artifacts().find(keys)
    directory = model_directory(dataset.target)
    if directory is None or None not in found:
        return found
    try:
        shipped = read_artifacts(directory, read_card(directory)).find(keys)
    except (FileError, ModelError):  # then these rows are learned by their configurations alone
        return found
    return [own or other for own, other in zip(found, shipped)]


def used_rows(
    cache: WinnerCache, target: Target, protocol: Named
) -> tuple[dict[tuple[Workload, GemmConfig], float], dict[Workload, float], Counter[str]]:
    """Return the rows of a cache that were timed on this target by this protocol, none held out.

    Returns:
        (latency_us, torch_us, dropped): both in us, ``torch_us`` of the workloads on which
        ``torch.matmul`` was timed; ``dropped`` counts what was left out, by reason: rows, and files
        that are no entries.
    """
    entries, unreadable = cache.survey()
    dropped = Counter([UNREADABLE] * len(unreadable))
    latency_us = {}
    torch_us: dict[Workload, float] = {}
    for entry in entries:
        result = entry.result
        if reason := _foreign(entry, target, protocol):
            dropped[reason] += len(result.measured)
            continue
        for config, measurement in result.measured:
            pair = result.workload, config
            if reason := _unfit(entry, config, measurement, target):
                dropped[reason] += 1
            elif pair in latency_us:
                dropped["timed twice"] += 1
            else:
                latency_us[pair] = measurement.latency_us
        if result.torch is not None and not _unlikely(result.torch, result.workload, target):
            torch_us.setdefault(result.workload, result.torch.latency_us)
    return latency_us, torch_us, +dropped


def _foreign(entry: CacheEntry, target: Target, protocol: Named) -> str:
    """Return why nothing of an entry can be used; empty if something can."""
    result, key = entry.result, entry.key
    if not result.timed or not result.source.startswith("device ("):
        return "not timed on a device"
    ours, theirs = target.device, result.target.device
    same = all(getattr(ours, name) == getattr(theirs, name) for name in _DEVICE)
    if not same or result.target.toolchain != target.toolchain:
        return "of another device or toolchain"
    timed_by = key.get("protocol")
    if not isinstance(timed_by, Mapping) or any(
        name not in timed_by or timed_by[name] != protocol.get(name) for name in _PROTOCOL.split()
    ):
        return "of another timing protocol"
    return HELD_OUT if is_held_out(result.workload) else ""


def _unfit(entry: CacheEntry, config: GemmConfig, measurement: Measurement, target: Target) -> str:
    """Return why a row cannot be used; empty if it can."""
    workload, hashes = entry.result.workload, entry.key.get("kernels")
    name = config.kernel
    if not isinstance(hashes, Mapping) or hashes.get(name) != kernel_hash(name):
        return f"kernel {name} has changed"
    if not measurement.ok:
        return measurement.status
    if why_illegal(config, workload, target.device):
        return "not legal"
    if _unlikely(measurement, workload, target):
        return "a time that cannot be"
    return ""


def _unlikely(measurement: Measurement, workload: Workload, target: Target) -> bool:
    """Return True if there is no time, or one that this device cannot have taken."""
    least_us = _LEAST_ROOFLINES * workload.roofline_us(target.device)
    return not measurement.ok or not least_us <= measurement.latency_us <= _LONGEST_US
