"""The key of a choice: which products share it, and how it is to be made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from costmodel.data.candidates import CostModel
from costmodel.gemm.grid import grid_hash
from costmodel.gemm.kernel_code import kernel_hashes
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload
from costmodel.hardware.installed import driver_version, triton_build
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol
from costmodel.tuning.tuner import untimed_because
from costmodel.tuning.tuning_result import TuningResult


@dataclass(frozen=True, slots=True)
class TuningKey:
    """A bucket of products that share a choice, and how it is to be made.

    Attributes:
        largest: the product of the last m of the bucket. All that a configuration asks of a device
            grows with m: what is legal there is legal for the whole bucket.
        m_range: the first and the last m of the bucket.
        device_index: the CUDA device.
        mode: one of ``TUNING_MODES``.
        model: compared by identity; None is the one that answers without being named.
        k, include_torch: of :func:`costmodel.tuning.tuner.tune`.
        epoch: of the process group whose ranks are to choose alike, see
            :func:`costmodel.tuning.ranks.epoch`; 0 without one.
    """

    largest: Workload
    m_range: tuple[int, int]
    device_index: int
    mode: str = "auto"
    model: CostModel | None = None
    k: int = 8
    include_torch: bool = True
    epoch: int = 0

    def workload(self, m: int) -> Workload:
        """The product of one m of the bucket."""
        return replace(self.largest, m=m)

    def on_disk(self, target: Target, model: CostModel) -> dict[str, Any]:
        """All that the choice rests on, readable: other devices, compilers, models are other keys.

        Args:
            model: the one that answers.
        """
        import torch

        workload = self.largest
        first, last = self.m_range
        timed = not untimed_because(workload, self.mode)
        return {
            "name": f"{first}-{last}x{workload.n}x{workload.k}-{target.device.name}",
            "m": [first, last],
            **{name: value for name, value in workload.to_dict().items() if name != "m"},
            "device": target.device.product,
            "arch": target.device.arch,
            "sm_count": target.device.sm_count,
            "driver": driver_version(),
            "triton": target.toolchain.triton,
            "triton_build": triton_build(),
            "ptxas": target.toolchain.ptxas,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "kernels": kernel_hashes(),
            "space": grid_hash(),
            "model": model.name,
            "model_hash": str(getattr(model, "hash", "")),
            "mode": self.mode,
            "top_k": self.k,
            "include_torch": self.include_torch,
            "protocol": TimingProtocol().to_dict() if timed else None,
        }

    def accepts(self, result: TuningResult, target: Target, model: CostModel) -> bool:
        """Return True if a result from disk is of this key, and what it chose may run here."""
        of, (first, last) = result.workload, self.m_range
        if not first <= of.m <= last or self.workload(of.m) != of:
            return False
        if result.target != target:  # whose figures a launch goes by
            return False
        if (result.model, result.model_hash) != (model.name, str(getattr(model, "hash", ""))):
            return False
        segments = result.plan.segments if result.plan else ()
        chosen = {result.config, *(segment.config for segment in segments)}
        return not any(why_illegal(c, self.largest, target.device) for c in chosen if c is not None)
