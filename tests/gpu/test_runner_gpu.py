"""The device runner on a GPU: kernels that are wrong, wild, endless or slow, and what a time is.

The faulty kernels are in a copy of the package that the timing process finds first (see
``faulty_kernels.py``): tiles of 32x32 have faults, chosen by BLOCK_K; others are as they should be.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel.collect.sampling import RandomSampler
from costmodel.data.measurement import Candidate, Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import compile_many, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.device import DeviceRunner
from costmodel.measure.protocol import TimingProtocol
from costmodel.tuning.tuner import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

SHAPE = Workload.dense(1024, 1024, 1024)
GOOD = GemmConfig("pointer", 64, 64, 64, 4, 3)
ALSO_GOOD = GemmConfig("pointer", 64, 128, 32, 4, 3)
MANY_TILES = GemmConfig("pointer", 16, 32, 64, 4, 3, split_k=2)

HALF_WRITTEN = GemmConfig("pointer", 32, 32, 16, 4, 2)
WILD_AT_ONCE = GemmConfig("pointer", 32, 32, 32, 4, 2)
WILD_THE_TENTH_TIME = GemmConfig("pointer", 32, 32, 64, 4, 2, split_k=2)
ENDLESS = GemmConfig("pointer", 32, 32, 128, 4, 2)
SLOW = GemmConfig("pointer", 32, 32, 256, 4, 2)


def candidates(*configs: GemmConfig) -> list[Candidate]:
    return [Candidate(c) for c in configs]


def statuses(measured: Sequence[Measurement]) -> list[str]:
    return [m.status for m in measured]


def children() -> set[int]:
    """Running processes that this one started."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    pids = {int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()}
    return {p for p in pids if runs(p)}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has faulty kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        module = importlib.import_module("faulty_kernels")
    copy: Path = module.copy_package(tmp_path_factory.mktemp("faulty"), module.FAULTS)
    return copy


@pytest.fixture
def others() -> set[int]:
    """Timing processes of other tests."""
    return children()


@pytest.fixture
def faulty_runner(
    others: set[int], faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceRunner]:
    """Its timing process runs the faulty kernels; it is ended after 20 s."""
    monkeypatch.syspath_prepend(str(faulty))
    with DeviceRunner(protocol=TimingProtocol(limit_s=20.0)) as runner:
        assert runner.measure(SHAPE, candidates(GOOD))[0].ok  # start-up is not what is tested
        yield runner


@pytest.fixture(scope="module")
def runner() -> Iterator[DeviceRunner]:
    with DeviceRunner() as runner:
        yield runner


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.fault("B09")
def test_half_a_result_is_wrong_whatever_was_there_before(faulty_runner: DeviceRunner) -> None:
    measured = faulty_runner.measure(SHAPE, candidates(GOOD, HALF_WRITTEN, ALSO_GOOD))
    assert statuses(measured) == ["ok", "wrong_result", "ok"]
    wrong = measured[1]
    assert isnan(wrong.latency_us)
    assert wrong.error.startswith(f"{1024 * 512} of {1024 * 1024} elements are off")


@pytest.mark.fault("B04")
@pytest.mark.parametrize("wild", [WILD_AT_ONCE, WILD_THE_TENTH_TIME], ids=["at once", "tenth time"])
def test_a_wild_write_costs_one_row(
    faulty_runner: DeviceRunner, others: set[int], wild: GemmConfig
) -> None:
    before = children() - others
    batch = candidates(GOOD, MANY_TILES, wild, ALSO_GOOD, GOOD)
    measured = faulty_runner.measure(SHAPE, batch)
    assert statuses(measured) == ["ok", "ok", "crashed", "ok", "ok"]
    assert "illegal memory access" in measured[2].error
    assert before
    assert not any(runs(pid) for pid in before), "timing goes on in a fresh process"
    assert measured[4].latency_us == pytest.approx(measured[0].latency_us, rel=0.3)


@pytest.mark.fault("B27")
def test_an_endless_kernel_is_ended_at_its_limit(
    faulty_runner: DeviceRunner, others: set[int]
) -> None:
    before = children() - others
    start = time.monotonic()
    (endless,) = faulty_runner.measure(SHAPE, candidates(ENDLESS))
    took_s = time.monotonic() - start
    assert endless.status == "timeout"
    assert endless.error == "over 20 s"
    assert 20 <= took_s < 30
    assert not any(runs(pid) for pid in before)
    assert faulty_runner.measure(SHAPE, candidates(GOOD))[0].ok, "the GPU is free again"


@pytest.mark.fault("B61")
def test_a_very_slow_kernel_is_given_up_early(faulty_runner: DeviceRunner) -> None:
    (good,) = faulty_runner.measure(SHAPE, candidates(GOOD))
    (first,) = faulty_runner.measure(SHAPE, candidates(SLOW), best_us=good.latency_us)
    start = time.monotonic()
    (slow,) = faulty_runner.measure(SHAPE, candidates(SLOW), best_us=good.latency_us)
    took_s = time.monotonic() - start
    assert statuses([first, slow]) == ["too_slow", "too_slow"]
    assert slow.latency_us > 500 * good.latency_us, "if this fails, make the kernel slower"
    assert slow.repeats == 1
    assert f"the best so far {good.latency_us:.1f}" in slow.error
    assert took_s < 5 * slow.latency_us / 1e6 + 0.5


@pytest.mark.fault("B04")
def test_a_fault_among_finalists(faulty_runner: DeviceRunner) -> None:
    measured = faulty_runner.compare(SHAPE, [GOOD, HALF_WRITTEN, None], rounds=3)
    assert statuses(measured) == ["ok", "wrong_result", "ok"]


@pytest.mark.fault("B14")
def test_what_cannot_be_loaded_is_a_row_with_its_reason(runner: DeviceRunner) -> None:
    refused = {
        GemmConfig("tma", 128, 256, 64, 8, 8): "out_of_resources",  # 384 KiB of shared memory
        GemmConfig("tma", 128, 128, 64, 4, 3, maxnreg=80): "compile_error",
    }
    batch = candidates(GOOD, *refused, GOOD)
    measured = runner.measure(SHAPE, batch)
    assert statuses(measured) == ["ok", *refused.values(), "ok"]
    assert all(m.error and len(m.error) <= 500 for m in measured[1:-1])
    assert "shared memory" in measured[1].error
    assert "ptxas" in measured[2].error.lower()


def test_operands_beyond_the_memory_are_a_row(runner: DeviceRunner) -> None:
    huge = Workload.dense(300_000, 300_000, 64)
    config = GemmConfig("pointer", 128, 128, 64, 8, 3)
    assert statuses(runner.measure(huge, candidates(config))) == ["out_of_resources"]
    assert runner.measure_torch(huge).status == "out_of_resources"
    assert statuses(runner.measure(SHAPE, candidates(GOOD))) == ["ok"]


@contextmanager
def only_free(size_bytes: int) -> Iterator[None]:
    """Another program on the device leaves no more than this."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(free - size_bytes, 0), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


@pytest.mark.alone
@pytest.mark.parametrize("free_bytes", [2**28, 2**30])
def test_a_full_device_predicts_instead_of_running_out(free_bytes: int) -> None:
    """In the first case not even the timing process has room, in the second no operands."""
    large = Workload.dense(8192, 8192, 8192)
    with only_free(free_bytes), DeviceRunner() as full:
        assert full.measure_torch(large).no_room
        result = tune(large, runner=full, k=2)
    assert result.config is not None
    assert not result.timed
    assert not result.reliable


@pytest.mark.alone
def test_a_nearly_full_device_is_timed_with_less(runner: DeviceRunner) -> None:
    large = Workload.dense(8192, 8192, 8192)
    with only_free(3 * 2**30), DeviceRunner() as tight:
        (measured,) = tight.measure(large, candidates(GOOD))
    assert measured.ok
    (expected,) = runner.measure(large, candidates(GOOD))
    assert measured.latency_us == pytest.approx(expected.latency_us, rel=0.1)


@pytest.mark.alone
def test_a_timing_process_that_rests_holds_little(runner: DeviceRunner) -> None:
    assert runner.measure(Workload.dense(16384, 16384, 4096), candidates(GOOD))[0].ok
    before, _ = torch.cuda.mem_get_info()
    runner.rest()
    after, _ = torch.cuda.mem_get_info()
    assert after - before > 2**30
    assert runner.measure(SHAPE, candidates(GOOD))[0].ok


@pytest.mark.fault("B52")
def test_the_interpreter_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timing process compiles, whatever the caller's process does: as fast as ever."""
    with DeviceRunner() as runner:
        compiled = runner.measure(SHAPE, candidates(GOOD))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with DeviceRunner() as runner:
        measured = runner.measure(SHAPE, candidates(GOOD))
    assert statuses(measured) == statuses(compiled)
    assert measured[0].latency_us < 2 * compiled[0].latency_us


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.fault("B44")
@pytest.mark.alone
def test_a_launch_that_does_nothing_takes_two_microseconds() -> None:
    """With one launch in a replay, filling the cache (30 us and more) would show."""
    tiny, config = Workload.dense(16, 16, 16), GemmConfig("pointer", 16, 16, 16, 1, 1)
    for max_launches, limit_us in ((40, 5.0), (1, 12.0)):
        protocol = TimingProtocol(max_launches=max_launches)
        with DeviceRunner(protocol=protocol) as runner:
            (measured,) = runner.measure(tiny, candidates(config))
        print(f"{max_launches} launches: {measured.latency_us:.2f} us")
        assert measured.ok
        assert 0.5 < measured.latency_us < limit_us


@pytest.mark.fault("B44")
@pytest.mark.alone
def test_the_cache_is_cold(runner: DeviceRunner) -> None:
    """One row times 32 MiB of B: from memory in over 11 us, from L2 in less."""
    workload, config = Workload.dense(1, 8192, 2048), GemmConfig("pointer", 16, 64, 128, 4, 5)
    device = Target.current().device
    (measured,) = runner.measure(workload, candidates(config))
    assert measured.latency_us > workload.bytes() / device.bandwidth_gbs / 1e3


@pytest.mark.fault("B47")
@pytest.mark.alone
def test_times_agree_with_torchs_own_events(runner: DeviceRunner) -> None:
    """A long product, where neither launches nor the cache count."""
    workload = Workload.dense(4096, 4096, 4096)
    measured = runner.measure_torch(workload)
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(a, b)  # while it runs, the rest is queued: the host is not timed
        begin.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
        time.sleep(0.002)
    assert measured.latency_us == pytest.approx(float(np.median(times)), rel=0.2)
    assert measured.p10_us <= measured.latency_us <= measured.p90_us


@pytest.mark.fault("B43")
@pytest.mark.alone
def test_the_order_of_trial_does_not_choose_the_winner(runner: DeviceRunner) -> None:
    """Ten near the best, from either end, on a card at rest and on one at work."""
    workload = Workload.dense(2048, 2048, 2048)
    configs = [
        GemmConfig("tma", 128, 256, 64, 8, 3),
        GemmConfig("tma", 128, 256, 64, 8, 4, halves=True),
        GemmConfig("tma", 128, 128, 64, 4, 4),
        GemmConfig("tma", 128, 128, 64, 8, 5),
        GemmConfig("tma", 256, 128, 64, 8, 3),
        GemmConfig("tma_persistent", 128, 256, 64, 8, 3),
        GemmConfig("tma_persistent", 128, 128, 64, 4, 4, flatten=True),
        GemmConfig("pointer", 128, 128, 64, 8, 3),
        GemmConfig("pointer", 128, 256, 64, 8, 3),
        GemmConfig("pointer", 128, 256, 64, 8, 4),
    ]
    runner.measure(workload, candidates(*configs))  # compiled and loaded
    winners = set()
    for turn in range(5):
        for order in (configs, configs[::-1]):
            if turn % 2:
                time.sleep(1.0)  # a cold GPU
            measured = runner.measure(workload, candidates(*order))
            assert statuses(measured) == ["ok"] * len(order)
            latency_us = {c: m.latency_us for c, m in zip(order, measured, strict=True)}
            winners.add(min(latency_us, key=lambda c: latency_us[c]))
    final = runner.compare(workload, sorted(winners), rounds=15)
    regrets = [m.latency_us / min(f.latency_us for f in final) - 1 for m in final]
    print({str(c): f"{100 * r:.1f} %" for c, r in zip(sorted(winners), regrets, strict=True)})
    assert max(regrets) < 0.03


@pytest.mark.fault("B43")
@pytest.mark.alone
def test_repeats_agree(runner: DeviceRunner) -> None:
    workload, config = Workload.dense(1024, 4096, 4096), GemmConfig("tma", 128, 256, 64, 8, 4)
    latency_us = [runner.measure(workload, candidates(config))[0].latency_us for _ in range(8)]
    print([f"{x:.2f}" for x in latency_us])
    assert max(latency_us) / min(latency_us) < 1.06


@pytest.mark.fault("B43")
def test_clocks_are_noted(runner: DeviceRunner) -> None:
    pytest.importorskip("pynvml")
    (measured,) = runner.measure(SHAPE, candidates(GOOD))
    assert 200 <= measured.clock_mhz <= 2 * Target.current().device.clock_mhz


@pytest.mark.alone
def test_200_rows_a_second(runner: DeviceRunner, tmp_path: Path) -> None:
    from triton import knobs

    target = Target.current()
    workload = Workload.dense(512, 4096, 4096)
    chosen = RandomSampler(250).sample(SearchSpace.of(workload, target), np.random.default_rng(0))
    specs = {specialize(workload, c) for c in chosen}
    cache = Path(knobs.cache.dir)
    made = {a.spec: a for a in compile_many(specs, target, cache=cache)}
    batch = [Candidate(c, made[specialize(workload, c)]) for c in chosen]
    # Binaries are loaded once for all the workloads that they serve.
    runner.measure(Workload.dense(16, 4096, 4096), batch)
    runner.measure(workload, batch[:1])
    start = time.monotonic()
    measured = runner.measure(workload, batch)
    rate = len(batch) / (time.monotonic() - start)
    counts = {s: statuses(measured).count(s) for s in sorted(set(statuses(measured)))}
    print(f"{rate:.0f} rows/s; {counts}")
    assert counts["ok"] >= 0.9 * len(batch)
    assert rate >= 200


@pytest.mark.fault("B41")
@pytest.mark.alone
def test_memory_does_not_grow_with_the_rows(runner: DeviceRunner) -> None:
    """Workloads and failures come and go; what the timing process holds stays."""
    shapes = [Workload.dense(m, 1024, k) for m in (64, 500, 2000) for k in (512, 1000, 2048)]
    batch = candidates(GOOD, ALSO_GOOD, MANY_TILES, GemmConfig("tma", 128, 256, 64, 8, 8))

    def turn() -> tuple[float, float]:
        for shape in shapes:
            runner.measure(shape, batch)
        free, total = torch.cuda.mem_get_info()
        resident = sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in children()
        )
        return (total - free) / 2**20, resident / 2**20

    before = [turn() for _ in range(3)][-1]
    after = [turn() for _ in range(12)][-1]
    assert after[0] - before[0] < 64, "device memory, MiB"
    assert after[1] - before[1] < 64, "host memory, MiB"
