"""Another m of a bucket, as ``matmul`` meets it: in each mode, from disk, by threads, failing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_fakes import LAW, K, N, ask, best_us, faked, is_timed, law_us, timed_us
from dispatch_fakes import Machine, wait_until

import costmodel
from costmodel.data.measurement import Measurement
from costmodel.dispatch import dispatch
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield faked(monkeypatch, tmp_path)
    wait_until(lambda: dispatch._background.is_idle)  # the next test counts what it loads


@pytest.mark.fault("B23")
@pytest.mark.parametrize("mode", ["auto", "predict"])
def test_a_bucket_is_tuned_once_and_each_m_has_what_is_fastest(machine: Machine, mode: str) -> None:
    before = costmodel.stats()
    found = {m: ask(m, mode) for m in range(2060, 2561, 50)}
    done = costmodel.stats().since(before)
    assert done.tuned + done.predicted == 1
    assert len({result.chosen for result in found.values()}) > 1
    for m, result in found.items():
        assert result.config is not None
        workload = Workload.dense(m, N, K)
        assert law_us(workload, result.config) < 1.1 * best_us(workload)


def test_a_bucket_is_planned_for_its_second_m_and_stays_so_on_disk(machine: Machine) -> None:
    ask(2060), ask(2060)
    (entry,) = dispatch.winners.cache.entries()
    assert entry.result.plan is None
    found = {m: ask(m).chosen for m in (2060, 2300, 2560)}
    machine.restart()
    machine.bench.before = lambda: pytest.fail("timed again")
    assert {m: ask(m).chosen for m in found} == found


@pytest.mark.fault("B13")
def test_what_cannot_be_loaded_gives_way_to_the_winner(machine: Machine) -> None:
    winner = ask(2060)
    assert winner.config is not None
    machine.refuses = lambda spec: spec.config_binary != winner.config.binary
    for m in (2300, 2560):
        ask(m)
    launches = {launch.config for launch, *_ in dispatch.launches.begin().values()}
    assert launches == {winner.config}


@pytest.mark.fault("B49")
@pytest.mark.parametrize("mode", ["auto", "predict", "never", "background"])
@pytest.mark.parametrize("m", [2060, 2560])
def test_after_warmup_no_m_of_the_bucket_compiles_or_loads(
    machine: Machine, m: int, mode: str
) -> None:
    costmodel.warmup([(m, N, K)], mode=mode, model=LAW)
    before = costmodel.stats()
    chosen = {ask(any_m, mode).chosen for any_m in range(2049, 2561, 17)}
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.compiled, done.loaded) == (0, 0, 0, 0)
    assert len(chosen) > 1


def test_never_takes_what_its_part_has_and_times_nothing(machine: Machine) -> None:
    winner = ask(2060)
    machine.restart()
    machine.bench.before = lambda: pytest.fail("something is timed")
    assert ask(2060, "never").config == winner.config
    chosen = ask(2560, "never").config
    assert chosen != winner.config
    machine.restart()
    assert ask(2560, "never").config == chosen, "it is on disk"
    machine.bench.before = lambda: None
    machine.restart()
    timed = machine.bench.timings
    ask(2560)
    assert machine.bench.timings > timed, "a prediction does not stand in for timings"
    machine.restart()
    machine.bench.before = lambda: pytest.fail("timed again")
    assert ask(2560).config == ask(2560, "never").config


@pytest.mark.fault("B15")
@pytest.mark.parametrize("tuned_before", [True, False])
def test_threads_with_other_m_tune_once_and_spread_once(
    machine: Machine, tuned_before: bool
) -> None:
    if tuned_before:
        ask(2060)
    ms = [*range(2100, 2500, 50)]
    before, used = costmodel.stats(), len(machine.bench.waited)
    start = threading.Barrier(len(ms))
    found: dict[int, TuningResult] = {}

    def work(m: int) -> None:
        start.wait(60)
        found[m] = ask(m)

    threads = [threading.Thread(target=work, args=(m,)) for m in ms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert costmodel.stats().since(before).tuned == (not tuned_before)
    assert len(machine.bench.waited) == used + 1 + (not tuned_before)
    (entry,) = dispatch.winners.cache.entries()
    assert {m: result.config for m, result in found.items()} == {
        m: entry.result.at(m).config for m in ms
    }


def in_another_process(machine: Machine, m: int, mode: str = "auto") -> TuningResult:
    """Ask with memory of its own, and put back what this process has."""
    here = dispatch.winners, dispatch.launches, dispatch._background
    machine.restart()
    found = ask(m, mode)
    dispatch.winners, dispatch.launches, dispatch._background = here
    return found


def test_what_another_process_has_timed_is_not_timed_again(machine: Machine) -> None:
    ask(2060)
    there = in_another_process(machine, 2560)
    timed = machine.bench.timings
    assert ask(2560, "never").config == ask(2560).config == there.config
    assert machine.bench.timings == timed
    (entry,) = dispatch.winners.cache.entries()
    assert is_timed(entry.result)


def test_a_budget_for_one_part_is_spent_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costmodel.tuning.planning._BUDGET_S", -1.0)
    for first in (2100, 2300, 2500):
        machine.restart()
        dispatch.winners.cache.clear()
        ask(2060), ask(first)
        timed = machine.bench.timings
        machine.restart()
        ask(first), ask(2200)
        assert machine.bench.timings == timed
        (entry,) = dispatch.winners.cache.entries()
        assert is_timed(entry.result)
        assert len({part.latency_us is None for part in entry.result.plan.segments}) == 2


def test_what_cannot_be_timed_does_not_stop_the_product(machine: Machine) -> None:
    winner = ask(2060)
    machine.restart()

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    machine.bench.before = refuse
    assert ask(2560).config not in (None, winner.config), "what is expected stands"
    wait_until(lambda: ask(2300, "background").config is not None)


def test_what_was_forgotten_while_the_disk_was_read_stays_forgotten(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2060)
    in_another_process(machine, 2560)
    read = dispatch.winners.cache.get

    def slow(key: Any) -> TuningResult | None:
        found = read(key)
        dispatch.winners.forget()
        return found

    monkeypatch.setattr(dispatch.winners.cache, "get", slow)
    key = key_of(2300)
    assert is_timed(dispatch.winners.find(key, 2300))
    assert dispatch.winners.known(key, on_disk=False) is None
    assert dispatch.winners.known(key) is not None
    assert dispatch.winners.known(key, on_disk=False) is None


def test_a_job_from_before_all_was_forgotten_is_done_again(machine: Machine) -> None:
    """As ``use`` does it: what the job finds is not kept, so that it is to be found anew."""
    winner = ask(2060)
    goes_on, is_there = threading.Event(), threading.Event()
    machine.bench.before = lambda: bool(is_there.set()) or goes_on.wait(60)
    ask(2560, "background")
    assert is_there.wait(60)
    dispatch.winners.forget()
    dispatch.forget_launches()
    goes_on.set()
    wait_until(lambda: dispatch._background.is_idle)
    dispatch.winners.cache.clear()  # of another model there is nothing
    assert ask(2060).config == winner.config
    wait_until(lambda: ask(2560, "background").config not in (None, winner.config))


def test_timing_in_vain_is_not_tried_again(machine: Machine) -> None:
    ask(2060)
    machine.bench.latency_us = lambda *_: float("nan")
    used = len(machine.bench.waited)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dispatch_fakes._ok", lambda _: Measurement("crashed"))
        chosen = {ask(m).chosen for m in (2300, 2400, 2560)}
    assert len(machine.bench.waited) == used + 1
    assert chosen, "what is expected stands"
    machine.bench.latency_us = timed_us
    dispatch.winners.tune(key_of(2060), 2060)
    used = len(machine.bench.waited)
    dispatch.forget_launches()
    ask(2300)
    assert len(machine.bench.waited) == used + 1, "of a new tuning it is tried anew"


@pytest.mark.fault("B05")
def test_a_capture_takes_what_is_loaded_and_does_not_keep_it(machine: Machine) -> None:
    winner = ask(2060)
    machine.capturing = True
    a, b = torch.empty(2560, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, model=LAW)
    assert costmodel.result_for(a, b, model=LAW) is None
    machine.capturing = False
    assert ask(2560).config != winner.config
    machine.capturing = True
    assert ask(2560).config != winner.config, "now it is loaded"


@pytest.mark.fault("B49")
def test_in_the_background_no_call_waits_for_another_part(machine: Machine) -> None:
    loaded_by: set[int] = set()
    machine.refuses = lambda _: bool(loaded_by.add(threading.get_ident()))
    for m in (2060, 2300, 2560):
        wait_until(lambda m=m: ask(m, "background").config == expected(m))
    assert len({expected(m) for m in (2060, 2300, 2560)}) > 1
    assert threading.get_ident() not in loaded_by


def test_in_the_background_a_winner_on_disk_serves_until_its_part_is_timed(
    machine: Machine,
) -> None:
    winner = ask(2060)
    machine.restart()
    go_on = threading.Event()
    machine.bench.before = lambda: go_on.wait(60)
    wait_until(lambda: ask(2560, "background").config == winner.config)
    go_on.set()
    wait_until(lambda: ask(2560, "background").config not in (None, winner.config))


def key_of(m: int) -> TuningKey:
    return dispatch.winners.key(Workload.dense(m, N, K), -1, model=LAW)


def expected(m: int) -> GemmConfig | str | None:
    """What a bucket that was tuned, and planned, has for an m."""
    found = dispatch.winners.known(key_of(m))
    if found is None or not dispatch.winners.is_final(key_of(m), m, found):
        return "not known yet"
    return found.config_at(m)
