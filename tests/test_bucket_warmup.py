"""Whatever a bucket's parts have is loaded by a warm-up, and who cannot load it says so.

The machine's torch can be made the fastest at some m, as cuBLAS is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bucket_fakes import LAW, K, N, ask, best_us, faked, is_timed, law_us
from dispatch_fakes import Machine

import costmodel
from costmodel.dispatch import dispatch, warmup
from costmodel.errors import RankError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import MOST, Workload

BUCKET = (2049, 2560)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return faked(monkeypatch, tmp_path)


def torch_takes(machine: Machine, times: Callable[[int], float]) -> None:
    """So many times what the best configuration takes, by m."""

    def us(workload: Workload, config: GemmConfig | None) -> float:
        return 1.2 * (law_us(workload, config) if config else best_us(workload) * times(workload.m))

    machine.bench.latency_us = us


@pytest.mark.fault("B49")
@pytest.mark.parametrize("m", [2112, 2496, 2560])
@pytest.mark.parametrize("factor", [0.985, 1.5])
def test_a_part_that_ends_at_the_m_that_was_tuned_is_loaded_too(
    machine: Machine, m: int, factor: float
) -> None:
    """What its last m has is the winner of the tuning, not what the part has."""
    torch_takes(machine, lambda other: factor if other == m else 1.5)
    (found,) = costmodel.warmup([(m, N, K)], model=LAW)
    assert found is not None
    assert (found.config is None) == (factor < 1)
    before = costmodel.stats()
    chosen = {ask(any_m).chosen for any_m in range(BUCKET[0], BUCKET[1] + 1, 7)}
    assert len(chosen) > 1
    done = costmodel.stats().since(before)
    assert (done.tuned, done.timed, done.loaded) == (0, 0, 0)


@pytest.mark.fault("B08", "B49")
def test_a_bucket_of_two_classes_of_code_is_warmed_up_whole(machine: Machine) -> None:
    """From some m on the offsets take 64 bits."""
    n, k, m = 8, 65544, 28673
    largest = dispatch.winners.buckets.of(m)[1]
    assert Workload.dense(largest, n, k).code.wide > Workload.dense(m, n, k).code.wide
    costmodel.warmup([(m, n, k)], model=LAW)
    before = costmodel.stats()
    b = torch.empty(k, n, dtype=torch.float16)
    for other in (m + 1, 30_000, 32_700, largest - 3, largest):
        costmodel.matmul(torch.empty(other, k, dtype=torch.float16), b, model=LAW)
    done = costmodel.stats().since(before)
    assert (done.tuned, done.timed, done.loaded) == (0, 0, 0)


@pytest.mark.fault("B49")
def test_the_last_bucket_is_warmed_up_to_the_largest_m(machine: Machine) -> None:
    (found,) = costmodel.warmup([(MOST - 7, 1, 1)], model=LAW)
    assert found is not None
    assert found.workload.m == MOST - 7


@pytest.mark.fault("B49")
def test_a_bucket_that_ends_beyond_what_the_device_holds_is_warmed_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = warmup._blank_operands

    def blank_operands(workload: Workload, device: Any) -> Any:
        if workload.m > 2**20 and device != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return blank(workload, device)

    monkeypatch.setattr(warmup, "_blank_operands", blank_operands)
    costmodel.set_buckets(bounds=(64, 2**31 - 1))
    (found,) = costmodel.warmup([(4096, N, K)], model=LAW)
    assert found is not None
    before = costmodel.stats()
    assert ask(4096).config == found.config
    assert costmodel.stats().since(before).loaded == 0


@pytest.mark.fault("B29")
@pytest.mark.filterwarnings("ignore:no configuration.*torch computes it:RuntimeWarning")
def test_a_rank_that_cannot_load_what_a_part_has_does_not_go_by_torch(machine: Machine) -> None:
    """Though torch is the winner of the m that was tuned: the other ranks go by the part."""
    torch_takes(machine, lambda m: 0.5 if m < 2100 else 2.0)
    assert ask(2060).config is None
    wanted = ask(2560).config
    assert wanted is not None
    machine.restart()
    machine.refuses = lambda spec: spec.config_binary == wanted.binary
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RankError, match="cannot be loaded"):
            costmodel.warmup([(2060, N, K)], model=LAW, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_where_a_part_has_torch_the_background_needs_no_winner(machine: Machine) -> None:
    torch_takes(machine, lambda m: 2.0 if m < 2100 else 0.5)
    winner = ask(2060).config
    assert winner is not None
    assert ask(2560).config is None
    machine.restart()
    machine.refuses = lambda spec: spec.config_binary == winner.binary
    before = costmodel.stats()
    a, b = torch.empty(2560, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    while costmodel.stats().since(before).background_done == 0:
        costmodel.matmul(a, b, mode="background", model=LAW)
    assert costmodel.stats().since(before).tuned == 0
    (entry,) = dispatch.winners.cache.entries()
    assert entry.result.config == winner
    assert is_timed(entry.result)


@pytest.mark.fault("B05")
def test_a_capture_does_not_keep_a_winner_by_the_parts_of_another_mode(machine: Machine) -> None:
    ask(2060, "topk"), ask(2300), ask(2560)  # of these, only ``auto`` is spread
    dispatch.forget_launches()
    a, b = torch.empty(2560, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    options: dict[str, Any] = {"mode": "never", "model": LAW}
    machine.capturing = True
    costmodel.matmul(a, b, **options)
    assert costmodel.result_for(a, b, **options) is None
