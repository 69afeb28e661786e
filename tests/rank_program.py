"""One rank of the tests of process groups: ``rank_program.py RANK SIZE FOLDER SCENARIO``.

There is no GPU: operands lie on the CPU, a launch only remembers its configuration, and timings
are replayed. Each rank has a cache of its own, and timings by which another configuration is the
fastest. What a rank found is written to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import costmodel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.dispatch import dispatch, resolve_launch, warmup
from costmodel.errors import CostModelError, LaunchError
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch.fast import TorchLaunch
from costmodel.measure.replay import ReplayRunner
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
M, N, K = 600, 1024, 1024
RUN = RunInfo("run", "GPU-a", "570", "2.11", "2026-11-27T00:00:00+00:00")


class FakeLaunch(TorchLaunch):
    """Computes nothing, and knows what it would launch."""

    def __init__(self, result: Any) -> None:
        super().__init__("none", result)
        self.config = result.config

    def __call__(self, *operands: Any) -> None:
        pass


class Rank:
    """One process without a GPU, as if it had one."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.timed = 0
        self.cannot_load: Callable[[Any], bool] = lambda result: False
        self.target = H100
        self.recording = self._recorded()
        dispatch.winners = Winners(
            WinnerCache(folder / f"cache-{rank}"),
            target_of=lambda _: self.target,
            process_of=lambda _: self,
            compile_=lambda specs, target: (),
        )
        fakes: list[tuple[Any, str, Any]] = [
            (resolve_launch, "first_launch", self._load),
            (warmup, "_blank_operands", self._operands),
            (torch.cuda, "device", lambda _: nullcontext()),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_device", lambda: -1),  # what a tensor on the CPU says
            (Target, "current", lambda index=None: self.target),
            (costmodel.dispatch.check, "_check_devices", lambda tensors: None),
        ]  # fmt: skip
        for owner, name, fake in fakes:
            setattr(owner, name, fake)

    def _recorded(self) -> Dataset:
        """By this rank's timings its own configuration is the fastest."""
        data = Dataset.create(self.folder / f"data-{self.rank}", H100, {"repeats": 5})
        workload = Workload.dense(M, N, K)
        configs = SearchSpace.of(workload, H100).configs[:8]
        times = [50.0 + (i - self.rank) % 8 for i in range(8)]
        rows = [
            TuningRecord(workload, c, "", Measurement("ok", t))
            for c, t in zip(configs, times, strict=True)
        ]
        data.append_measurements(rows, run=RUN, torch={workload: Measurement("ok", 99.0)})
        return data

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[ReplayRunner]:
        self.timed += 1
        yield ReplayRunner(self.recording)

    def _load(self, configs: Any, workload: Any, index: int, result: Any) -> Any:
        if self.cannot_load(result):
            raise LaunchError(f"{result.config} cannot be loaded")
        return FakeLaunch(result)

    def _operands(self, workload: Workload, index: int) -> Any:
        a, b, out = (
            torch.empty(shape, dtype=torch.float16)
            for shape in (
                (workload.m, workload.k),
                (workload.k, workload.n),
                (workload.m, workload.n),
            )
        )
        return a, b, out, None

    def chosen(self, m: int, mode: str = "auto") -> str:
        """What a product of m rows launches."""
        a, b, *_ = self._operands(Workload.dense(m, N, K), 0)
        # Processors take seconds for a product in float16.
        with patch("torch.matmul", lambda a, b: (a.bfloat16() @ b.bfloat16()).half()):
            costmodel.matmul(a, b, mode=mode)
        launch = dispatch.entry_for(a, b, mode=mode)[0]
        assert launch is not None
        return str(launch.config or "torch")

    def warmed(self, problems: Any = ((M, N, K),), **options: Any) -> str:
        """What is agreed on for the first problem, or the error."""
        group = options.pop("group", None) or dist.group.WORLD
        try:
            (result, *_) = costmodel.warmup(problems, group=group, **options)
        except CostModelError as error:
            return f"{type(error).__name__}: {error}"
        assert result is not None
        return str(result.chosen)


def join(rank: int, size: int, folder: Path, name: str) -> None:
    store = f"file://{folder}/store-{name}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)


def decide(me: Rank, size: int) -> dict[str, Any]:
    """Everything that works, and every way to fail that all survive."""
    found: dict[str, Any] = {"alone": me.chosen(M)}
    join(me.rank, size, me.folder, "one")
    me.timed = 0
    # In another order on each rank: the first m of a bucket must not decide.
    order = [M, 610, 640, 100]
    order = order[me.rank % 4 :] + order[: me.rank % 4]
    predicted = {m: me.chosen(m) for m in order}
    found["predicted"] = [predicted[m] for m in (M, 610, 640, 100)]
    found["in other modes"] = [me.chosen(M, mode) for mode in ("predict", "background", "never")]
    found["timed"] = me.timed
    try:
        me.chosen(M, "exhaustive")
    except CostModelError as error:
        found["exhaustive"] = f"{type(error).__name__}: {error}"
    found["other problems"] = me.warmed([(M, N, K if me.rank != 2 else 512)])
    found["more problems"] = me.warmed([(M, N, K)] * (1 + (me.rank == 1)))
    found["other mode"] = me.warmed(mode="never" if me.rank == 1 else "auto")
    found["no iterable"] = me.warmed(5 if me.rank == 1 else ((M, N, K),))
    if me.rank == 3:
        me.target = replace(H100, device=replace(H100.device, product="NVIDIA H200"))
    found["other device"] = me.warmed()
    me.target = H100
    me.cannot_load = lambda result: me.rank == 2 and result.timed
    found["cannot load"] = me.warmed()
    me.cannot_load = lambda result: False
    found["after it"] = me.chosen(M)
    found["nothing to time with"] = me.warmed([(2048, N, K)])
    me.timed = 0
    found["agreed"] = me.warmed()
    found["timed for it"] = me.timed
    found["then"] = [me.chosen(m) for m in (M, 610, 640)]
    found["then in other modes"] = [me.chosen(M, mode) for mode in ("background", "never")]
    found["never"] = me.warmed(mode="never")
    dispatch.winners.forget()
    dispatch.winners.cache.clear()
    found["cold"] = me.warmed()
    found["timed when cold"] = me.timed
    found["anew"] = me.warmed(mode="exhaustive")
    found["exhaustive then"] = me.chosen(M, "exhaustive")
    torch.use_deterministic_algorithms(True)
    found["deterministic"] = me.chosen(M)
    torch.use_deterministic_algorithms(False)
    half = dist.new_group([0, 1])
    if me.rank < 2:
        found["of a part"] = me.warmed([(2, N, K)], group=half)
    else:
        try:
            costmodel.warmup([(2, N, K)], group=half)
        except CostModelError as error:
            found["of a part"] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    found["alone again"] = me.chosen(M)
    join(me.rank, size, me.folder, "two")
    found["in another group"] = me.chosen(M)
    dist.barrier()
    dist.destroy_process_group()
    return found


def die(me: Rank, size: int) -> dict[str, Any]:
    """The last rank is killed while the others wait for it."""
    join(me.rank, size, me.folder, "one")
    if me.rank == size - 1:
        me.cannot_load = lambda result: os._exit(9)
    try:
        return {"error": me.warmed()}
    except RuntimeError as error:  # torch's own
        return {"error": type(error).__name__}


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    found = globals()[sys.argv[4]](Rank(rank, folder), size)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except LaunchError:
        raise SystemExit(3) from None
