"""A collection on a Ray cluster: Ray carries work as bundles, and nothing else.

Any node with free cores makes a bundle of a chunk of a work list; a bundle that exists already is
cut into parts. The actor of a GPU times each bundle or part, and returns the rows as files.
Compiling, timing and isolation are the same as on one machine. If a node is lost, its work is
handed out again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from costmodel.collect import Jobs, split_anchors
from costmodel.collect.bundle import require_usable, unpack, write_bundle
from costmodel.collect.machine import Timer
from costmodel.collect.parts import part_of
from costmodel.collect.sampling import read_worklist
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity
from costmodel.errors import MissingData, NoGpu
from costmodel.hardware.installed import driver_cuda
from costmodel.hardware.target import Target

_CHUNK = 8  # workloads that travel together
_PARTS = 4  # of a bundle for each GPU: some parts take longer, and a node may be lost


def collect_on_ray(
    work: Jobs | Path,
    identity: Identity,
    absorb: Callable[[Path], object],
    on_line: Callable[[str], None],
    deadline: float,
    *options: Any,
    place: tuple[int, int] = (1, 1),
) -> None:
    """Time workloads, or a bundle, on all GPUs of the cluster that this process belongs to.

    Args:
        identity: the target of the GPUs, and the protocol.
        absorb: called with a folder that holds the rows of one chunk.
        on_line: called with a line about the progress.
        deadline: in seconds of time.monotonic(); nothing is begun after it.
        options: of :class:`Gpu`.
        place: number and count of the part of a bundle to time; jobs are those of a part already.

    Raises:
        MissingData: Ray is not installed. NoGpu: the cluster has no GPU.
        MixedData: a node has another kind of GPU, Triton or driver.
    """
    ray, gpus = _connected()
    actor, finished = ray.remote(num_gpus=1)(Gpu), 0
    left = _bundles(ray, work, identity, place, _PARTS * gpus, *options)
    total, busy = len(left), dict[Any, Any]()  # by pending result: its actor, and the work

    def start() -> None:
        one = actor.remote(*options)
        busy[one.__ray_ready__.remote()] = one, None

    for _ in range(gpus):
        start()
    while (left and time.monotonic() < deadline) or any(mine for _, mine in busy.values()):
        done = ray.wait([*busy])[0][0]
        one, mine = busy.pop(done)
        try:
            content = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None  # the work failed, not a node
        except ray.exceptions.RayError:
            on_line("a node was lost; what it was timing is handed out again")
            left += [mine] if mine else []
            start()
            continue
        if mine:
            with TemporaryDirectory() as folder:
                for name, file in content.items():
                    Path(folder, name).write_bytes(file)
                absorb(Path(folder))
            finished += 1
            on_line(f"{finished} of {total} chunks are timed")
        if left and time.monotonic() < deadline:
            mine = left.pop(0)
            busy[one.time.remote(*mine)] = one, mine


def _bundles(
    ray: Any, work: Jobs | Path, identity: Identity, place: tuple[int, int], cuts: int,
    replay: Path | None, *_: object,
) -> list[tuple[Any, int, int]]:  # fmt: skip
    """Return bundles, each with the number of the part to time, and the count of parts."""
    if isinstance(work, Path):
        bundle = ray.put(work.read_bytes())
        number, parts = place
        return [(bundle, number + i * parts, cuts * parts) for i in range(cuts)]
    anchors, jobs = split_anchors(work)
    chunks = [[*anchors, *jobs[i : i + _CHUNK]] for i in range(0, len(jobs), _CHUNK)]
    compile_ = ray.remote(max_retries=-1)(_compiled)
    return [(compile_.remote(chunk, identity, replay), 1, 1) for chunk in chunks]


def _connected() -> tuple[Any, int]:
    """Return Ray, and the number of GPUs in the cluster."""
    try:
        import ray
    except ImportError:
        raise MissingData("--engine ray needs Ray: run `pip install 'ray>=2.60'`") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or this machine
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        raise NoGpu("--engine ray: the cluster has no GPU: start its nodes with --num-gpus")
    return ray, gpus


# --- On the nodes ---------------------------------------------------------------------------------


def _compiled(jobs: Jobs, identity: Identity, replay: Path | None) -> bytes:
    """Return a chunk as a bundle."""
    known = None if replay is None else Dataset.open(replay).artifacts()
    with TemporaryDirectory() as name:
        file = Path(name) / "bundle"
        write_bundle(file, jobs, identity.target, identity.protocol, n_jobs=1, known=known)
        return file.read_bytes()


class Gpu:
    """The actor of one GPU.

    Args:
        replay: a dataset that every node can read, which answers in place of the GPU.
        kernels: times a part of an unpacked bundle of users' kernels: called with the bundle's
            folder, a folder for timings, and number and count of the part.
    """

    def __init__(
        self, replay: Path | None, kernels: Callable[[Path, Path, int, int], None] | None = None
    ):
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        self._path, self._replay, self._kernels = Path(self._folder.name), replay, kernels
        self._timer: Timer | None = None

    def time(self, content: bytes, number: int, parts: int) -> dict[str, bytes]:
        """Time a part of a bundle; return the files of its rows."""
        file = self._path / "bundle"
        file.write_bytes(content)
        made = Target.from_dict(unpack(file, self._path).target)
        if self._replay is None:
            here = Target.current()
            require_usable(file, made, here, driver_cuda())
            Identity(made, {}).require_same(Identity(here, {}), Path("a node of the cluster"))
        with TemporaryDirectory() as name:
            out = Path(name)
            times = self._kernels or self._collect
            times(self._path, out, number, parts)
            return {file.name: file.read_bytes() for file in out.iterdir()}

    def _collect(self, folder: Path, out: Path, number: int, parts: int) -> None:
        if self._timer is None:  # made here: its errors count as a chunk's, and end the collection
            recording = None if self._replay is None else Dataset.open(self._replay)
            self._timer = Timer(recording, folder / "cache")
        made = Dataset.open(folder / "data")
        jobs = part_of(read_worklist(folder / "worklist.parquet", made.identity), number, parts)
        dataset = Dataset.create(out, made.target, made.protocol)
        self._timer.collect(jobs, dataset, made.artifacts())
