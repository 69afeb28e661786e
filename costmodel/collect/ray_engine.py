"""A collection on a Ray cluster: Ray carries chunks of work, and nothing else.

A chunk becomes a bundle on any node with free cores, is timed by the actor of a GPU, and comes back
as a dataset. What compiles, times and isolates is what runs on one machine. The chunks of a node
that is lost are handed out again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from costmodel.collect import Job
from costmodel.collect.bundle import unpack, write_bundle
from costmodel.collect.machine import Timer
from costmodel.collect.sampling import read_worklist
from costmodel.data.dataset import Dataset
from costmodel.errors import MissingData, NoGpu
from costmodel.hardware.target import Target


def collect_on_ray(
    chunks: Sequence[Sequence[Job]],
    dataset: Dataset,
    replay: Path | None,
    deadline: float,
    on_line: Callable[[str], None],
) -> None:
    """Time chunks of work on all GPUs of the cluster that this process belongs to.

    Args:
        dataset: where rows go, whole chunks at a time.
        replay: a dataset that every node can read, which answers in place of GPUs.
        deadline: of time.monotonic(); no chunk is begun after it.
        on_line: called with a line about each chunk that is there.

    Raises:
        MissingData: Ray is not installed. NoGpu: the cluster has no GPU.
    """
    ray, gpus = _connected()
    compile_, actor = ray.remote(_compiled), ray.remote(num_gpus=1)(_Gpu)
    place = dataset.target, dict(dataset.protocol), replay
    left = [(chunk, compile_.remote(chunk, *place)) for chunk in chunks]
    busy: dict[Any, Any] = {}  # what is waited for: whose it is, and the chunk

    def start() -> None:
        one = actor.remote(replay)
        busy[one.__ray_ready__.remote()] = one, None

    for _ in range(gpus):
        start()
    while (left and time.monotonic() < deadline) or any(work for _, work in busy.values()):
        done = ray.wait([*busy])[0][0]
        one, work = busy.pop(done)
        try:
            content = ray.get(done)
        except ray.exceptions.RayTaskError:
            raise  # a fault of this program, not of a node
        except ray.exceptions.RayError:
            on_line("a node was lost; what it was timing is handed out again")
            if work:
                left.append((work, compile_.remote(work, *place)))
            start()
            continue
        if work:
            with tempfile.TemporaryDirectory() as folder:
                for name, file in content.items():
                    Path(folder, name).write_bytes(file)
                dataset.absorb(Dataset.open(folder))
            on_line(f"{len(work)} workloads are timed, {len(left)} chunks are left")
        if left and time.monotonic() < deadline:
            chunk, bundle = left.pop(0)
            busy[one.time.remote(bundle)] = one, chunk


def _connected() -> tuple[Any, int]:
    """Return Ray, and the number of GPUs in the cluster."""
    try:
        import ray
    except ImportError:
        raise MissingData("--engine ray needs Ray: run `pip install 'costmodel[ray]'`") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or this machine
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        raise NoGpu("--engine ray: the cluster has no GPU: start its nodes with --num-gpus")
    return ray, gpus


# --- On the nodes ---------------------------------------------------------------------------------


def _compiled(
    jobs: Sequence[Job], target: Target, protocol: dict[str, Any], replay: Path | None
) -> bytes:
    """Return a chunk as a bundle."""
    known = None if replay is None else Dataset.open(replay).artifacts()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "bundle"
        write_bundle(file, jobs, target, protocol, known=known)
        return file.read_bytes()


class _Gpu:
    """The actor of one GPU."""

    def __init__(self, replay: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._path, self._replay = Path(self._folder.name), replay
        self._timer: Timer | None = None

    def time(self, content: bytes) -> dict[str, bytes]:
        """Time a bundle; return the files of its rows."""
        file = self._path / "bundle"
        file.write_bytes(content)
        unpack(file, self._path)
        if self._timer is None:  # its errors are those of a chunk, and end the collection
            recording = None if self._replay is None else Dataset.open(self._replay)
            self._timer = Timer(recording, self._path / "cache")
        made = Dataset.open(self._path / "data")
        with tempfile.TemporaryDirectory() as name:
            out = Dataset.create(name, made.target, made.protocol)
            jobs = read_worklist(self._path / "worklist.parquet", made.identity)
            self._timer.collect(jobs, out, made.artifacts())
            return {file.name: file.read_bytes() for file in out.path.iterdir()}
