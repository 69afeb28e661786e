"""How a call is answered in each mode, what is pinned, and what happens in a capture; on a CPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_fakes import H100, MODEL, Machine, operands, result_of, wait_until

import costmodel
from costmodel.dispatch import dispatch
from costmodel.dispatch.background import Background
from costmodel.errors import IllegalConfig, InvalidInput, LaunchError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.tuning.modes import MODES, TUNING_MODES
from costmodel.tuning.tuning_result import PINNED, TuningResult

LARGE, SMALL = (24, 640, 128), (24, 48, 128)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield Machine(monkeypatch, tmp_path)
    # The next test counts what it does; a job in the background would add to it.
    wait_until(lambda: dispatch._background.is_idle)


def ask(size: tuple[int, int, int], mode: str | None = None, **options: Any) -> TuningResult:
    """A call that must be right, and what it went by, whether or not that is kept."""
    a, b = operands(*size)

    def call() -> TuningResult | None:
        found = costmodel.matmul(a, b, mode=mode, model=MODEL, **options)
        torch.testing.assert_close(found.float(), a.float() @ b.float(), atol=1e-2, rtol=1e-2)
        return costmodel.result_for(a, b, mode=mode, model=MODEL, **options)

    return result_of(call)


# --- what each mode times -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "size", "timed"),
    [
        ("auto", LARGE, 8), ("auto", SMALL, 0), ("topk", LARGE, 8), ("topk", SMALL, 8),
        ("predict", LARGE, 0), ("heuristic", LARGE, 0), ("never", LARGE, 0), ("never", SMALL, 0),
    ],
)  # fmt: skip
def test_what_a_mode_times(
    machine: Machine, mode: str, size: tuple[int, int, int], timed: int
) -> None:
    before = costmodel.stats()
    assert ask(size, mode).timed == bool(timed)
    assert ask(size, mode).timed == bool(timed)
    done = costmodel.stats().since(before)
    assert (done.timed, len(machine.bench.timed)) == (timed, timed)
    assert (done.tuned, done.predicted) == ((1, 0) if timed else (0, 1))
    assert (done.prepared, done.misses, done.loaded) == (1, 1, 1)


def test_topk_has_winners_of_its_own(machine: Machine) -> None:
    ask(LARGE, "auto")
    ask(LARGE, "topk")
    assert {e.result.mode for e in dispatch.winners.cache.entries()} == {"auto", "topk"}


@pytest.mark.parametrize("known", ["auto", "topk", "exhaustive"])
def test_never_goes_by_what_was_tuned_before(machine: Machine, known: str) -> None:
    tuned = _tune(LARGE, known)
    machine.restart()  # as after `costmodel tune --mode`
    timed = len(machine.bench.timed)
    before = costmodel.stats()
    found = ask(LARGE, "never")
    assert found.config == tuned.config
    assert found.mode == known
    done = costmodel.stats().since(before)
    assert (done.disk_hits, done.tuned, done.predicted, done.loaded) == (1, 0, 0, 1)
    assert len(machine.bench.timed) == timed


@pytest.mark.fault("B13")
def test_never_predicts_where_the_winner_no_longer_loads(machine: Machine) -> None:
    tuned = _tune(LARGE, "auto")
    assert tuned.config is not None
    machine.restart()
    binary = tuned.config.binary
    machine.refuses = lambda spec: spec.config_binary == binary
    found = ask(LARGE, "never")
    assert found.mode == "predict"
    assert {e.result.mode for e in dispatch.winners.cache.entries()} == {"auto", "predict"}


def _tune(size: tuple[int, int, int], mode: str) -> TuningResult:
    # -1: the "device" of CPU tensors
    key = dispatch.winners.key(Workload.dense(*size), -1, mode=mode, model=MODEL)
    return dispatch.winners.tune(key, size[0])


# --- the mode of all calls ----------------------------------------------------------------------


def test_the_environment_is_read_at_the_first_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_MODE", "topk")
    assert ask(SMALL).mode == "topk"
    assert ask(SMALL, "predict").mode == "predict", "a call's own mode wins"
    monkeypatch.setenv("COSTMODEL_MODE", "heuristic")
    assert ask(LARGE).mode == "topk", "read once"
    costmodel.set_mode("predict")
    assert ask(LARGE).mode == "predict", "known calls follow, too"
    costmodel.set_mode(None)
    assert ask(LARGE).mode == "heuristic"


def test_a_wrong_mode_is_refused_wherever_it_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    costmodel.set_mode("predict")
    with pytest.raises(InvalidInput, match="background"):
        costmodel.set_mode("fastest")
    assert ask(LARGE).mode == "predict", "nothing has changed"
    costmodel.set_mode(None)
    monkeypatch.setenv("COSTMODEL_MODE", "fastest")
    with pytest.raises(InvalidInput, match="COSTMODEL_MODE='fastest'"):
        ask(LARGE)


@pytest.mark.parametrize("mode", sorted(set(MODES) - set(TUNING_MODES)))
def test_tune_is_told_how_and_not_when(mode: str) -> None:
    with pytest.raises(InvalidInput, match=f"{mode}.*says when"):
        costmodel.tune(64, 64, 64, mode=mode)


# --- pinned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_what_is_pinned_wins_in_every_mode(machine: Machine, mode: str) -> None:
    workload = Workload.dense(*LARGE)
    chosen = SearchSpace.of(workload, H100).configs[7]
    assert costmodel.pin(chosen, *LARGE).config == chosen
    found = ask(LARGE, mode)
    assert (found.config, found.source, found.timed) == (chosen, PINNED, False)
    machine.capturing = True
    assert ask(LARGE, mode, bias=None).config == chosen
    machine.capturing = False
    assert costmodel.pin("torch", workload).config is None
    assert ask(LARGE, mode).config is None
    assert costmodel.unpin(*operands(*LARGE))
    assert not costmodel.unpin(*LARGE)
    if mode != "background":
        assert ask(LARGE, mode).source != PINNED
    assert dispatch.winners.cache.entries() == [] or mode != "background"


def test_a_pin_is_of_one_workload_alone(machine: Machine) -> None:
    chosen = SearchSpace.of(Workload.dense(*LARGE), H100).configs[7]
    costmodel.pin(chosen, *LARGE)
    assert ask((25, *LARGE[1:]), "predict").source != PINNED
    bias = torch.zeros(LARGE[1]).half()
    assert ask(LARGE, "predict", bias=bias).source != PINNED
    costmodel.pin(chosen, *LARGE, bias=True)
    assert ask(LARGE, "predict", bias=bias).source == PINNED


def test_what_cannot_run_is_not_pinned(machine: Machine) -> None:
    with pytest.raises(IllegalConfig, match=r"24x640x128.*h100-sxm: shared memory"):
        costmodel.pin(GemmConfig("pointer", 256, 256, 256, 8, 8), *LARGE)
    for wrong in ("cublas", None, 3):
        with pytest.raises(InvalidInput, match="GemmConfig, 'torch'"):
            costmodel.pin(wrong, *LARGE)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="over 0"):
        costmodel.pin("torch", 0, 4, 4)
    machine.refuses = lambda _: True
    with pytest.raises(costmodel.CompileError):
        costmodel.pin(SearchSpace.of(Workload.dense(*LARGE), H100).configs[0], *LARGE)
    machine.refuses = lambda _: False
    assert ask(LARGE, "predict").source != PINNED


def test_a_pin_that_no_longer_loads_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    costmodel.pin(SearchSpace.of(Workload.dense(*LARGE), H100).configs[0], *LARGE)
    monkeypatch.setattr("costmodel.dispatch.loading._loaded", {})
    machine.refuses = lambda _: True
    with pytest.raises(LaunchError, match="unpin"):
        ask(LARGE, "auto")


# --- inside a capture ---------------------------------------------------------------------------


@pytest.mark.fault("B05")
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_with_nothing_loaded_is_torchs(machine: Machine, mode: str) -> None:
    a, b = operands(*LARGE)
    machine.capturing = True
    before = costmodel.stats()
    with pytest.warns(RuntimeWarning, match=r"warmup\(\[\(m, n, k\)\]\)"):
        found = costmodel.matmul(a, b, mode=mode, model=MODEL)
    torch.testing.assert_close(found, a @ b, atol=1e-2, rtol=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costmodel.matmul(a, b, mode=mode, model=MODEL)  # one warning is enough
    done = costmodel.stats().since(before)
    assert (done.makeshifts, done.loaded, done.tuned, done.predicted) == (2, 0, 0, 0)
    assert costmodel.result_for(a, b, mode=mode, model=MODEL) is None, "not kept"
    assert dispatch.winners.cache.entries() == []
    machine.capturing = False
    if mode == "auto":
        assert ask(LARGE, mode).timed, "the next call outside tunes"


@pytest.mark.fault("B05")
def test_a_capture_takes_the_winner_that_is_loaded(machine: Machine) -> None:
    winner = ask(LARGE, "auto")
    machine.capturing = True
    assert ask(LARGE, "auto") is winner
    assert ask((25, *LARGE[1:]), "auto") is winner, "another m of the bucket, not prepared"
    machine.capturing = False
    machine.restart()
    again = ask(LARGE, "auto")
    machine.capturing = True
    dispatch.forget_launches()
    assert ask(LARGE, "auto").config == again.config == winner.config


@pytest.mark.fault("B05")
def test_a_capture_takes_the_best_of_what_is_loaded(machine: Machine) -> None:
    winner = ask(LARGE, "auto")
    machine.capturing = True
    a, b = operands(700, *LARGE[1:])  # of another bucket
    before = costmodel.stats()
    costmodel.matmul(a, b, model=MODEL)
    assert costmodel.stats().since(before).makeshifts == 1
    resolved = machine.take_resolved()
    assert resolved is not None
    assert resolved.launch.config is not None
    assert winner.config is not None
    assert resolved.launch.config.binary == winner.config.binary
    assert not resolved.is_final
    machine.capturing = False
    assert ask((700, *LARGE[1:]), "auto").timed


@pytest.mark.fault("B05")
def test_a_winner_on_disk_that_is_not_loaded_waits_for_the_next_call(machine: Machine) -> None:
    winner = ask(LARGE, "auto")
    machine.restart()
    machine.capturing = True
    a, b = operands(*LARGE)
    with pytest.warns(RuntimeWarning, match="captured"):
        costmodel.matmul(a, b, model=MODEL)
    machine.capturing = False
    assert ask(LARGE, "auto").config == winner.config
    assert len(machine.bench.timed) == 8, "tuned once"


# --- in the background --------------------------------------------------------------------------


@pytest.mark.fault("B49")
def test_the_background_answers_at_once_and_switches_twice(machine: Machine) -> None:
    may_load, may_tune = threading.Event(), threading.Event()
    machine.refuses = lambda _: not may_load.wait(30)
    machine.bench.before = lambda: may_tune.wait(30)
    before = costmodel.stats()
    assert ask(LARGE, "background").chosen == "torch"
    may_load.set()
    wait_until(lambda: ask(LARGE, "background").chosen != "torch")
    assert ask(LARGE, "background").mode == "predict"
    for _ in range(3):
        ask((25, *LARGE[1:]), "background")  # of the same bucket: no other job
    may_tune.set()
    wait_until(lambda: ask(LARGE, "background").timed)
    winner = ask(LARGE, "background")
    assert winner is ask((25, *LARGE[1:]), "background") is ask(LARGE, "auto")
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted) == (1, 1)
    assert done.background_done in (1, 2), "the bucket may be planned by now, for the other m"
    assert not any(machine.bench.waited), "the caller's streams are left alone"


def test_winners_that_share_a_binary_are_both_launched_in_the_background(machine: Machine) -> None:
    """Such configurations differ only in how the binary is launched, as in the order of tiles."""
    products = {n: (1024, n, 1024) for n in (1024, 2048)}
    one, other = ({*SearchSpace.of(Workload.dense(*p), H100).configs} for p in products.values())
    by_binary: dict[object, list[GemmConfig]] = {}
    for config in sorted(one & other, key=str):
        by_binary.setdefault(config.binary, []).append(config)
    pair = next(configs for configs in by_binary.values() if len(configs) > 1)
    favourites = dict(zip(products, pair, strict=False))

    class Favourites(type(MODEL)):  # type: ignore[misc]
        def predict(self, workload: Workload, candidates: Any, target: Target) -> Any:
            return np.where([c == favourites[workload.n] for c in candidates.configs], 1.0, 50.0)

    model = Favourites()
    machine.bench.latency_us = lambda workload, config: (
        1.0 if config == favourites[workload.n] else 50.0
    )
    for n, product in products.items():
        a, b = operands(*product)

        def answer(a: torch.Tensor = a, b: torch.Tensor = b) -> TuningResult | None:
            costmodel.matmul(a, b, mode="background", model=model)
            return costmodel.result_for(a, b, mode="background", model=model)

        wait_until(lambda answer=answer: answer() is not None)  # type: ignore[misc]
        found = answer()
        assert found is not None
        assert found.config == favourites[n]


def test_the_background_takes_a_winner_that_is_on_disk(machine: Machine) -> None:
    winner = ask(LARGE, "auto")
    machine.restart()
    may_load = threading.Event()
    machine.refuses = lambda _: not may_load.wait(30)
    before = costmodel.stats()
    assert ask(LARGE, "background").chosen == "torch", "loading takes its time"
    may_load.set()
    wait_until(lambda: ask(LARGE, "background").config == winner.config)
    done = costmodel.stats().since(before)
    assert (done.disk_hits, done.tuned, done.predicted, done.loaded) == (1, 0, 0, 1)


@pytest.mark.fault("B13")
def test_a_winner_on_disk_that_no_longer_loads_is_replaced_in_the_background(
    machine: Machine,
) -> None:
    winner = ask(LARGE, "auto")
    assert winner.config is not None
    machine.restart()
    binary = winner.config.binary
    machine.refuses = lambda spec: spec.config_binary == binary
    before = costmodel.stats()
    ask(LARGE, "background")
    wait_until(lambda: costmodel.stats().since(before).background_failed == 1)
    assert costmodel.stats().since(before).tuned == 1, "once more, and the same one wins"
    assert ask(LARGE, "background").chosen == "torch"
    machine.refuses = lambda _: False
    dispatch.forget_launches()
    wait_until(lambda: ask(LARGE, "background").timed)


def test_a_small_product_is_only_predicted_in_the_background(machine: Machine) -> None:
    ask(SMALL, "background")
    wait_until(lambda: ask(SMALL, "background").mode == "auto")
    assert machine.bench.timed == []


@pytest.mark.fault("B66")
def test_a_failure_in_the_background_leaves_the_prediction_and_warns_once(
    machine: Machine,
) -> None:
    def broken() -> None:
        raise RuntimeError("no device")

    machine.bench.before = broken
    other = (24, 1280, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = costmodel.stats()
        for size in (LARGE, other):
            ask(size, "background")
        wait_until(lambda: costmodel.stats().since(before).background_failed == 2)
        for size in (LARGE, other):
            assert ask(size, "background").mode == "predict"
            assert ask((25, *size[1:]), "background").mode == "predict"
        time.sleep(0.05)
    told = [w for w in caught if "background" in str(w.message)]
    assert len(told) == 1
    assert "no device" in str(told[0].message)
    assert len(machine.bench.waited) == 2, "not tried again"
    machine.bench.before = lambda: None
    dispatch.forget_launches()  # as `use` and `set_mode` do: then it is
    wait_until(lambda: ask(LARGE, "background").timed)


def test_a_full_queue_is_asked_again_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background(at_most=1)
    monkeypatch.setattr(dispatch, "_background", background)
    may_tune = threading.Event()
    machine.bench.before = lambda: may_tune.wait(30)
    sizes = [(24, 640 * i, 128) for i in range(1, 5)]
    for size in sizes:
        ask(size, "background")
    before = costmodel.stats()
    may_tune.set()
    wait_until(lambda: background.is_idle)
    assert costmodel.stats().since(before).tuned <= 2, "one was under way, and one waited"
    for size in sizes:
        wait_until(lambda size=size: ask(size, "background").timed)  # type: ignore[misc]


@pytest.mark.fault("B15")
def test_many_threads_ask_the_background(machine: Machine) -> None:
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            barrier.wait()
            for m in range(20, 28):
                a, b = operands(m + i % 2, *LARGE[1:])
                found = costmodel.matmul(a, b, mode="background", model=MODEL)
                torch.testing.assert_close(found, a @ b, atol=1e-2, rtol=1e-2)
        except BaseException as error:
            errors.append(error)

    before = costmodel.stats()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    wait_until(lambda: all(ask((m, *LARGE[1:]), "background").timed for m in range(20, 29)))
    assert costmodel.stats().since(before).tuned == 1


@pytest.mark.filterwarnings("ignore:tuning in the background failed")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_a_job_raises_the_next_one_is_done(error: type[BaseException]) -> None:
    background = Background()

    def fail() -> None:
        raise error

    background.submit("wrong", fail)
    wait_until(lambda: background.failed("wrong") is not None)
    background.submit("right", lambda: None)
    wait_until(lambda: background.failed("right") is not None)
    background.forget()
    background.submit("wrong", lambda: None)
    wait_until(lambda: background.failed("wrong") is not None)


def test_where_no_thread_can_start_the_job_waits_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    background = Background()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            background.submit("a job", lambda: None)
    assert background.failed("a job") is None
    background.submit("a job", lambda: None)
    wait_until(lambda: background.failed("a job") is not None)


@pytest.mark.parametrize("job", ["time.sleep(600)", "[0 for _ in iter(int, 1)]"])
def test_the_interpreter_ends_while_the_background_is_busy(job: str) -> None:
    code = f"""
import time
from costmodel.dispatch.background import Background
background = Background()
started = []
def work():
    started.append(1)
    {job}
background.submit("a job", work)
while not started:
    time.sleep(0.01)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# --- ahead of time ------------------------------------------------------------------------------


@pytest.mark.fault("B49")
@pytest.mark.parametrize("mode", ["auto", "predict", "topk", "background", "never"])
def test_after_warmup_nothing_is_left_to_do_for_any_m_of_the_buckets(
    machine: Machine, mode: str
) -> None:
    problems = [(16, 640, 128), (33, 640, 128), (600, 48, 128)]
    results = costmodel.warmup(problems, mode=mode, model=MODEL)
    assert [r is not None and r.config is not None for r in results] == [True] * 3
    before = costmodel.stats()
    for m, n, k in problems:
        first, last = dispatch.winners.buckets.of(m)
        b = torch.zeros(k, n).half()
        for any_m in range(first, last + 1):
            costmodel.matmul(torch.zeros(any_m, k).half(), b, mode=mode, model=MODEL)
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.timed, done.compiled, done.loaded) == (0,) * 5
    assert done.misses == 0
