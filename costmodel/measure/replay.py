"""A runner that needs no GPU: it answers from a recording."""

import os
from math import inf, log2
from uuid import uuid4

from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Batch, Measurement, Measurements, RunInfo, Runner
from costmodel.errors import NotRecorded
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.validation import require


class ReplayRunner(Runner):
    """Answers from a dataset: a recorded outcome, failures too, or an error; never a guess."""

    needs_binaries = False

    def __init__(self, dataset: Dataset):
        """Raise InvalidInput for what is not a dataset."""
        self.dataset = require("dataset", dataset, Dataset, "a Dataset, see Dataset.open(path)")
        self._outcomes: dict[Workload, dict[GemmConfig, Measurement]] = {}

    @property
    def target(self) -> Target:
        """The target of the recording."""
        return self.dataset.target

    def workloads(self) -> list[Workload]:
        """Return the workloads that can be replayed."""
        return self.dataset.workloads()

    def configs(self, workload: Workload) -> list[GemmConfig]:
        """Return the configurations recorded for a workload.

        Raises:
            NotRecorded: the workload was never measured; the message names the nearest that were.
        """
        return list(self._recorded(workload))

    def measure(self, workload: Workload, candidates: Batch, best_us: float = inf) -> Measurements:
        """Return the recorded outcome of each candidate, in order.

        Raises:
            NotRecorded: the workload, or one of the configurations, was never measured.
        """
        outcomes = self._recorded(workload)
        for candidate in candidates:
            if candidate.config not in outcomes:
                raise NotRecorded(
                    f"{candidate.config} was not recorded for {workload}: {len(outcomes)} other "
                    f"configurations were, see ReplayRunner.configs(); the rest need a GPU"
                )
        return [outcomes[candidate.config] for candidate in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        """Return the recorded timing of ``torch.matmul``.

        Raises:
            NotRecorded: the workload was never measured, or not with torch.
        """
        measurement = self.dataset.torch(workload)
        if measurement is None:
            self._recorded(workload)
            raise NotRecorded(f"torch.matmul was not recorded for {workload}")
        return measurement

    def _recorded(self, workload: Workload) -> dict[GemmConfig, Measurement]:
        if workload not in self._outcomes:
            outcomes = self.dataset.recorded(workload)
            if not outcomes:
                known = self.workloads()
                nearest = sorted(known, key=lambda w: _distance(w, workload))[:3]
                raise NotRecorded(
                    f"{workload} was not recorded in {self.dataset.path}, which holds "
                    f"{len(known)} workloads, the nearest "
                    f"{', '.join(map(str, nearest)) or 'none'}: replay one of these, take a "
                    f"larger recording, or time on a GPU"
                )
            self._outcomes[workload] = outcomes
        return self._outcomes[workload]


def replayed_run() -> RunInfo:
    """Return the run of a replay, whose rows do not pass for timings of a card."""
    name = f"replay-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}-{os.getpid()}"
    return RunInfo(uuid4().hex, name, "", "", "")


def _distance(a: Workload, b: Workload) -> tuple[bool, float]:
    """Return a sort key: another code class is further than any size; sizes compare by ratio."""
    ratios = ((x + 1) / (y + 1) for x, y in zip(a.sizes, b.sizes))
    return a.code != b.code, sum(abs(log2(ratio)) for ratio in ratios)
