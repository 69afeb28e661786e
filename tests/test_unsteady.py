"""Timings that scatter, as where another program computes on the same GPU."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatch_fakes import Bench, Machine, find
from test_tuner import FakeRunner, first, run

from costmodel.data.measurement import Candidate, Measurement
from costmodel.errors import HostError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.measure.card import alone
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.session import Launch, Session
from costmodel.tuning.search import fastest

PRODUCT = Workload.dense(640, 4096, 1024)
Noise = Callable[[], float]


def quiet() -> float:
    """As of an H200 that does nothing else."""
    return random.gauss(1.0, 0.004)


def shared() -> float:
    """Some replays wait while the other program has the GPU."""
    return quiet() * random.choice((1, 1, 1, 2, 4, 6))


def timed(latency_us: float, noise: Noise, repeats: int) -> Measurement:
    times = [latency_us * noise() for _ in range(repeats)]
    p10, p50, p90 = np.quantile(times, (0.1, 0.5, 0.9))
    return Measurement("ok", float(p50), float(p10), float(p90), repeats)


class Scattering(FakeRunner):
    """Times with noise; latencies are by place in the ranking.

    Attributes:
        rounds, compared: of each comparison of finalists, and how many they were.
    """

    def __init__(self, us: Sequence[float], torch_us: float, noise: Callable[[int], Noise]) -> None:
        super().__init__(lambda c: self.time(c, 5))
        self.us = dict(zip(first(len(us)), us, strict=True))
        self.torch_us, self.noise = torch_us, noise
        self.rounds: list[int] = []
        self.compared: list[int] = []

    def time(self, config: GemmConfig | None, repeats: int) -> Measurement:
        us = self.torch_us if config is None else self.us[config]
        return timed(us, self.noise(len(self.rounds)), repeats)

    def measure_torch(self, workload: Workload) -> Measurement:
        return self.time(None, 5)

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.rounds.append(rounds)
        self.compared.append(len(configs))
        return [self.time(config, rounds) for config in configs]


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


@pytest.mark.fault("N6")
def test_timings_that_repeat_well_are_taken_once() -> None:
    for us in ((10.0, 10.01, 10.02, 10.03), (10.0, 12.0, 14.0, 16.0)):
        runner = Scattering(us, 20.0, lambda _: quiet)
        result = run(runner)
        assert (result.reliable, len(runner.rounds)) == (True, 1)


@pytest.mark.fault("N6")
def test_a_gpu_that_is_shared_for_a_moment_is_timed_again() -> None:
    runner = Scattering((16.0, 14.0, 12.0, 10.0), 20.0, lambda n: shared if n < 3 else quiet)
    result = run(runner)
    assert len(runner.rounds) == 3
    assert runner.rounds[-1] > runner.rounds[0]
    assert (result.config, result.reliable) == (first(4)[3], True), "none was dropped by chance"


@pytest.mark.fault("N6")
def test_a_gpu_that_stays_shared_is_told_of() -> None:
    runner = Scattering((16.0, 14.0, 12.0, 10.0), 11.0, lambda _: shared)
    result = run(runner)
    assert len(runner.rounds) == 3, "not for ever"
    assert not result.reliable
    assert "scatter too much to be sure" in result.why
    assert result.config is None, "torch may be faster"
    assert "is not surely 3 % faster" in result.why


@pytest.mark.fault("N6", "N11")
@pytest.mark.parametrize("noise", [quiet, shared, lambda: random.gauss(1, 0.05)])
def test_what_is_called_reliable_is(noise: Noise) -> None:
    """By its true latency: hardly ever slower than torch, or than another that was tried."""
    wrong = 0
    for _ in range(100):
        us = [random.uniform(9.0, 12.0) for _ in range(6)]
        torch_us = random.uniform(8.0, 12.0)
        result = run(Scattering(us, torch_us, lambda _: noise), k=6)
        chosen_us = torch_us if result.config is None else us[first(6).index(result.config)]
        if result.reliable:
            wrong += chosen_us > 1.05 * min(us) or chosen_us > 1.02 * torch_us
        elif result.config is not None:
            wrong += chosen_us > 1.02 * torch_us
    assert wrong <= 2


@pytest.mark.fault("N6")
def test_scatter_that_decides_nothing_costs_nothing() -> None:
    runner = Scattering((10.0, 100.0, 120.0, 140.0), 200.0, lambda _: lambda: random.gauss(1, 0.1))
    assert run(runner).reliable
    assert len(runner.rounds) == 1


@pytest.mark.fault("N6")
def test_an_exhaustive_search_on_a_shared_gpu_compares_a_few() -> None:
    runner = Scattering([10.0] * 40, 20.0, lambda _: shared)
    run(runner, k=40)
    assert max(runner.compared) <= 9, "more would take longer than a timing may"


class Crowded(Session):
    """Times on a GPU that others use most while its cache is filled."""

    def __init__(self) -> None:
        self._protocol, self._clock_mhz = TimingProtocol(), lambda: 0

    def _passed(self, choice: Any) -> tuple[Launch, None]:
        return (lambda _: None), None

    def _look(self, launch: Launch) -> float:
        return 6.0

    def _capture(self, launch: Launch, *_: Any) -> Any:
        return launch

    def _replay(self, graph: Any, *_: Any, **__: Any) -> list[float]:
        return [random.gauss(90.0, 5.0) if graph.__name__ == "_nothing" else 60.0]


@pytest.mark.fault("N6")
def test_a_comparison_that_others_disturb_is_an_unsure_one() -> None:
    """What is left of a replay after its fills' time may be less than nothing."""
    times = dict(enumerate(Crowded()._compare(["one", "other", None], 9)))
    assert all(m.ok and m.latency_us > 0 for m in times.values())
    assert fastest(times)[1]


class Busy(Bench):
    """Times on a GPU that another program uses, until it is told that this ended."""

    busy = True
    comparisons = 0

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.comparisons += 1
        noise = shared if self.busy else quiet
        return [timed(self.latency_us(workload, config), noise, rounds) for config in configs]

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        self.timed += [workload] * len(candidates)
        return [timed(self.latency_us(workload, c.config), quiet, 5) for c in candidates]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Busy:
    machine = Machine(monkeypatch, tmp_path)
    machine.bench = Busy()
    return machine.bench


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


@pytest.mark.fault("N6")
def test_an_unsteady_winner_serves_this_process_only(busy: Busy) -> None:
    result = find(PRODUCT)
    assert (result.timed, result.reliable) == (True, False)
    comparisons = busy.comparisons
    assert find(PRODUCT) is result, "not tuned at each call"
    assert busy.comparisons == comparisons
    busy.busy = False
    Machine.latest.restart()
    assert find(PRODUCT).reliable, "nothing was kept"


@pytest.mark.fault("N6")
def test_a_busy_gpu_is_tried_again_a_few_times(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    tunings = []
    for minute in range(6):
        with monkeypatch.context() as patch:
            later(patch, 61.0 * minute)
            before = busy.comparisons
            find(PRODUCT)
            find(PRODUCT)
            tunings.append(busy.comparisons > before)
    assert tunings == [True, True, True, False, False, False]


@pytest.mark.fault("N6")
def test_once_the_gpu_is_free_the_winner_is_kept(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(PRODUCT)
    busy.busy = False
    later(monkeypatch, 61.0)
    result = find(PRODUCT)
    assert result.reliable
    Machine.latest.restart()
    before = len(busy.timed)
    assert find(PRODUCT).config == result.config
    assert len(busy.timed) == before


@pytest.mark.fault("N6")
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), HostError("no room")])
def test_a_winner_stays_where_it_cannot_be_tuned_again(
    error: Exception, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = find(PRODUCT)
    failures: list[Exception] = []

    def fail() -> None:
        failures.append(error)
        raise error

    busy.before = fail
    for minute in range(6):
        with monkeypatch.context() as patch:
            later(patch, 61.0 * minute)
            assert find(PRODUCT) is result
    assert len(failures) == 2


@pytest.mark.fault("N6")
def test_two_timing_processes_take_turns_on_a_card() -> None:
    inside, seen, together = [0], [], threading.Barrier(4)

    def time_it() -> None:
        together.wait()
        for _ in range(5):
            with alone("GPU-of-this-test"):
                inside[0] += 1
                seen.append(inside[0])
                time.sleep(0.002)
                inside[0] -= 1

    threads = [threading.Thread(target=time_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 20


@pytest.mark.fault("N6", "N3")
def test_the_turn_of_a_process_that_hangs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with alone("GPU-of-this-test"), alone("GPU-of-this-test", wait_s=0.1):
        assert 0.1 <= time.monotonic() - start < 1.0
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with alone("GPU-of-this-test"):  # no file can be made there
        pass
    with pytest.raises(OSError, match="of the timing"), alone("GPU-of-this-test"):
        raise OSError("of the timing")
