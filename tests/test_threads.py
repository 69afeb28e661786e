"""Threads and devices: each winner is tuned once, and where it belongs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_dispatch
import torch
from random_model import RandomModel
from test_dispatch import H100, SIZES, A, B, Bench, find, winners_of

import costmodel
from costmodel.data.dataset import Dataset
from costmodel.dispatch import dispatch
from costmodel.errors import CostModelError
from costmodel.gemm.workload import Workload
from costmodel.measure.replay import ReplayRunner
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

recording, bench = test_dispatch.recording, test_dispatch.bench  # fixtures


@pytest.mark.fault("B15")
def test_threads_that_race_for_one_winner_tune_once(recording: Dataset, tmp_path: Path) -> None:
    bench = SlowBench(recording)
    winners = winners_of(bench, tmp_path)
    barrier = threading.Barrier(8)
    found: list[object] = []

    def ask() -> None:
        barrier.wait()
        found.append(find(winners, *SIZES[0]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert bench.uses == 1
    assert len(found) == 8
    assert all(result is found[0] for result in found)


class SlowBench(Bench):
    """Takes long enough for all other threads to come."""

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[ReplayRunner]:
        time.sleep(0.3)
        with super().runner(wait) as runner:
            yield runner


@pytest.mark.fault("B15", "B25")
def test_two_devices_are_tuned_apart_each_on_its_own(recording: Dataset, tmp_path: Path) -> None:
    other = replace(H100, device=replace(H100.device, product="NVIDIA H100 NVL", sm_count=114))
    benches = {0: Bench(recording), 1: Bench(recording)}
    targets = {0: H100, 1: other}

    def fresh() -> Winners:
        return Winners(
            WinnerCache(tmp_path),
            target_of=targets.__getitem__,
            process_of=benches.__getitem__,
            compile_=lambda specs, target: (),
        )

    winners = fresh()
    barrier = threading.Barrier(8)
    found: list[tuple[int, Any]] = []

    def ask(index: int) -> None:
        barrier.wait()
        found.append((index, find(winners, *SIZES[0], index=index)))

    threads = [threading.Thread(target=ask, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert {i: bench.uses for i, bench in benches.items()} == {0: 1, 1: 1}
    assert all(result.target == targets[index] for index, result in found)
    assert len(winners.cache.entries()) == 2
    for index in (0, 1):  # and each finds its own again
        again = find(fresh(), *SIZES[0], index=index)
        assert again.target == targets[index]
    assert {i: bench.uses for i, bench in benches.items()} == {0: 1, 1: 1}


@pytest.mark.fault("B25")
def test_the_device_of_the_operands_is_asked_and_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Answers:
        def key(self, workload: Workload, device_index: int, **options: Any) -> Any:
            asked.append(device_index)
            raise LookupError

    monkeypatch.setattr(dispatch, "winners", Answers())
    monkeypatch.setattr("costmodel.dispatch.check._check_devices", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(asked.append(index)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    with pytest.raises(LookupError):
        costmodel.matmul(A, B)
    assert asked == [3]


@pytest.mark.fault("B15")
def test_a_product_inside_a_tuning_is_an_error_and_no_deadlock(
    bench: Bench, tmp_path: Path
) -> None:
    winners = winners_of(bench, tmp_path)

    class Multiplies(RandomModel):
        def predict(self, *arguments: Any) -> Any:
            find(winners, *SIZES[1])
            return super().predict(*arguments)

    with pytest.raises(CostModelError, match="multiply with torch there"):
        find(winners, *SIZES[0], model=Multiplies())
    assert find(winners, *SIZES[0]).measured, "and the next one works"
