"""What is asked about a product, and which results answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from costmodel.data.candidates import CostModel
from costmodel.gemm.grid import grid_hash
from costmodel.gemm.kernel_code import kernel_hashes
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import MOST, MOST_OFFSET, Workload
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol
from costmodel.models.baselines import RuleHeuristic
from costmodel.support.installed import driver_version, triton_build
from costmodel.tuning.ranking import answering_model
from costmodel.tuning.tuner import untimed_because
from costmodel.tuning.tuning_result import TuningResult

__all__ = [
    "Question", "at_the_end", "fits", "is_by_model_of", "memory_key", "serves", "winner_key",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be computed, and how to choose.

    ``model`` is compared by identity, or as a path. ``epoch`` is that of the process group whose
    ranks are to choose alike (:func:`costmodel.tuning.ranks.epoch`); 0 is none.
    """

    workload: Workload
    device_index: int
    mode: str = "auto"
    model: CostModel | str | PathLike[str] | None = None
    k: int = 8
    include_torch: bool = True
    epoch: int = 0


def winner_key(question: Question, target: Target, rows: tuple[int, int]) -> dict[str, Any]:
    """All that a choice rests on, readable: another device, compiler or model is another key."""
    import torch

    workload, mode = question.workload, question.mode
    model, _ = answering_model(question.model, target, workload)
    if mode == "heuristic":
        model = RuleHeuristic()
    timed = not untimed_because(workload, mode)
    first, last = rows
    return {
        "name": f"{first}-{last}x{workload.n}x{workload.k}-{target.device.name}",
        "m": list(rows),
        **{k: v for k, v in workload.to_dict().items() if k != "m"},
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
        "mode": mode,
        "top_k": question.k,
        "include_torch": question.include_torch,
        "protocol": TimingProtocol().to_dict() if timed else None,
    }


def is_by_model_of(key: Mapping[str, Any], result: TuningResult) -> bool:
    """Whether a choice rests on the model of a key, and not on one that came to answer since."""
    return (key["model"], key["model_hash"]) == (result.model, result.model_hash)


def memory_key(question: Question, rows: tuple[int, int]) -> Any:
    """What tells the winners of one process apart."""
    w, q = question.workload, question
    return rows, w.n, w.k, w.code, q.device_index, q.mode, q.model, q.k, q.include_torch, q.epoch


def at_the_end(question: Question, rows: tuple[int, int]) -> tuple[Question, tuple[int, int]]:
    """The same question about the last m of a bucket, and its own row.

    What a configuration asks of the device grows with m: what may run the last may run them all.
    """
    workload = question.workload
    last = min(rows[1], MOST)
    if not workload.code.wide and last * max(workload.n, workload.k) > MOST_OFFSET:
        last = workload.m  # of the last m the operands would be another class of code
    return replace(question, workload=replace(workload, m=last)), (last, last)


def fits(result: TuningResult, workload: Workload) -> bool:
    """Whether the winner of another m, or what else it has for this one, may run it."""
    device, config = result.target.device, result.at(workload.m).config
    return config is None or not why_illegal(config, workload, device)


def serves(result: TuningResult, rows: tuple[int, int], target: Target, question: Question) -> bool:
    """Whether a winner from disk is one of these rows, as its key says, and may run here."""
    first, last = rows
    of = result.workload
    if not first <= of.m <= last or replace(question.workload, m=of.m) != of:
        return False
    if result.target != target:  # whose figures a launch goes by
        return False
    return result.config is None or not why_illegal(result.config, of, target.device)
