"""Modes, pins, captures and warm-ups inside a process group, here of one rank; on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatch_fakes import H100, MODEL, Machine, operands, wait_until

import costmodel
from costmodel.dispatch import dispatch
from costmodel.errors import InvalidInput, RankError
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.tuning.modes import MODES
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import PINNED, TuningResult

pytestmark = pytest.mark.fault("B29")

SIZE = (24, 640, 128)
ON_REQUEST = ("topk", "exhaustive")
PREDICTS = tuple(mode for mode in MODES if mode not in ON_REQUEST)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@contextmanager
def in_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def group(machine: Machine) -> Iterator[None]:
    with in_group():
        yield


def ask(size: tuple[int, int, int] = SIZE, mode: str = "auto") -> TuningResult:
    a, b = operands(*size)
    found = costmodel.matmul(a, b, mode=mode, model=MODEL)
    torch.testing.assert_close(found, a @ b, atol=1e-2, rtol=1e-2)
    result = costmodel.result_for(a, b, mode=mode, model=MODEL)
    assert result is not None
    return result


def warm(mode: str, size: tuple[int, int, int] = SIZE) -> TuningResult:
    (result,) = costmodel.warmup([size], mode=mode, model=MODEL, group=dist.group.WORLD)
    assert result is not None
    return result


def tuned(mode: str) -> TuningResult:
    """A winner on disk, of an earlier process."""
    return dispatch.winners.tune(key_of(SIZE, mode), SIZE[0])


def key_of(size: tuple[int, int, int], mode: str) -> TuningKey:
    return dispatch.winners.key(Workload.dense(*size), -1, mode=mode, model=MODEL)


# --- not agreed on ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PREDICTS)
def test_nothing_is_timed_and_no_disk_is_read(machine: Machine, mode: str) -> None:
    for known in ("auto", "topk", "exhaustive"):
        tuned(known)
    machine.restart()
    timed, kept = len(machine.bench.timed), len(dispatch.winners.cache.entries())
    before = costmodel.stats()
    with in_group():
        found = ask(mode=mode)
        ask((25, *SIZE[1:]), mode)
    assert not found.timed
    assert found.workload.m == 32, "by the last m of the bucket"
    done = costmodel.stats().since(before)
    assert (done.predicted, done.misses, done.loaded, done.disk_hits) == (1, 1, 1, 0)
    assert (len(machine.bench.timed), len(dispatch.winners.cache.entries())) == (timed, kept)
    assert dispatch._background.is_idle


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", ON_REQUEST)
def test_timings_on_request_are_refused_until_they_are_agreed_on(
    machine: Machine, mode: str
) -> None:
    ask()
    with pytest.raises(InvalidInput, match=rf"{mode}.*group=\.\.\."):
        ask(mode=mode)
    assert machine.bench.timed == []
    agreed = warm(mode)
    assert agreed.timed
    assert ask(mode=mode).to_dict() == agreed.to_dict()


def test_a_background_that_began_before_is_no_answer_inside(machine: Machine) -> None:
    may_tune = threading.Event()
    machine.bench.before = lambda: may_tune.wait(30)
    a, b = operands(*SIZE)
    costmodel.matmul(a, b, mode="background", model=MODEL)
    with in_group():
        first = ask(mode="background")
        may_tune.set()
        wait_until(lambda: dispatch._background.is_idle)
        assert ask(mode="background") is first
        assert not first.timed
        assert first.config is not None, "and not torch meanwhile"
    assert ask(mode="background").timed


def test_after_the_group_each_decides_for_itself(machine: Machine) -> None:
    alone = ask()
    with in_group():
        assert not ask().timed
        warm("predict")
    assert ask() is alone
    with in_group():
        assert not ask().timed, "another group has agreed on nothing"


# --- agreed on ----------------------------------------------------------------------------------


@pytest.mark.fault("B49")
@pytest.mark.parametrize("mode", MODES)
def test_a_warm_up_together_leaves_nothing_to_do_in_its_bucket(
    machine: Machine, group: None, mode: str
) -> None:
    agreed = warm(mode)
    assert agreed.timed == (mode in ("auto", "topk", "exhaustive", "background"))
    before = costmodel.stats()
    found = [ask((m, *SIZE[1:]), mode) for m in range(17, 33)]
    assert all(result.config == agreed.config for result in found)
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.loaded, done.misses) == (0, 0, 0, 0)


@pytest.mark.parametrize("known", ["auto", "topk", "exhaustive"])
def test_never_shares_the_first_ranks_winner_of_earlier_tuning(
    machine: Machine, known: str
) -> None:
    winner = tuned(known)
    machine.restart()
    timed = len(machine.bench.timed)
    with in_group():
        assert warm("never").config == winner.config
        assert ask(mode="never").mode == known
        assert ask(mode=known).config == winner.config
    assert len(machine.bench.timed) == timed


@pytest.mark.usefixtures("group")
def test_never_takes_what_was_agreed_on_for_another_mode(machine: Machine) -> None:
    assert ask(mode="never").mode == "predict"
    agreed = warm("auto")
    assert ask(mode="never").to_dict() == ask(mode="background").to_dict() == agreed.to_dict()
    torch.use_deterministic_algorithms(True)
    try:
        for mode in ("never", "background", "auto"):
            assert not ask(mode=mode).timed
        assert warm("auto").mode == "predict"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("group")
def test_another_model_is_not_held_to_it(machine: Machine) -> None:
    warm("auto")
    costmodel.use(None)
    assert not ask().timed


@pytest.mark.usefixtures("group")
def test_a_bucket_of_two_classes_of_code_is_agreed_on_twice(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its larger m need 64-bit offsets."""
    monkeypatch.setattr("dispatch_fakes.FakeLaunch.__call__", lambda *_: None)
    first, last, n, k = 28673, 32768, 8, 65544
    assert not Workload.dense(first, n, k).code.wide
    assert Workload.dense(last, n, k).code.wide
    warm("auto", (first, n, k))
    a, b = (torch.empty(size, dtype=torch.float16) for size in ((last, k), (k, n)))
    before = costmodel.stats()
    costmodel.matmul(a, b, model=MODEL)
    result = costmodel.result_for(a, b, model=MODEL)
    assert result is not None
    assert result.timed
    assert costmodel.stats().since(before).loaded == 0


@pytest.mark.usefixtures("group")
def test_the_default_mode_is_agreed_on_too(machine: Machine) -> None:
    costmodel.set_mode("topk")
    (agreed,) = costmodel.warmup([SIZE], model=MODEL, group=dist.group.WORLD)
    assert agreed is not None
    assert agreed.mode == "topk"
    a, b = operands(*SIZE)
    costmodel.matmul(a, b, model=MODEL)
    found = costmodel.result_for(a, b, model=MODEL)
    assert found is not None
    assert found.config == agreed.config


@pytest.mark.usefixtures("group")
def test_an_agreed_winner_that_cannot_be_loaded_is_torchs_and_not_tuned_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agreed = warm("auto")
    assert agreed.config is not None
    timed, binary = len(machine.bench.timed), agreed.config.binary
    monkeypatch.setattr("costmodel.dispatch.loading._loaded", {})
    machine.refuses = lambda spec: spec.config_binary == binary
    dispatch.forget_launches()
    a, b = operands(*SIZE)
    with pytest.warns(RuntimeWarning, match="torch computes it"):
        costmodel.matmul(a, b, model=MODEL)
    launch = dispatch.entry_for(a, b, model=MODEL)[0]
    assert launch is not None
    assert launch.config is None
    assert len(machine.bench.timed) == timed
    assert "tuning again" not in caplog.text
    with pytest.warns(RuntimeWarning, match="torch"), pytest.raises(RankError, match="LaunchError"):
        warm("auto")
    assert not ask().timed, "nothing holds after a failure"


@pytest.mark.usefixtures("group")
def test_a_rank_that_fails_before_it_takes_anything_keeps_no_older_agreement(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks, which fail later, have dropped theirs."""

    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    sizes = [SIZE, (700, *SIZE[1:])]
    options: dict[str, Any] = {"model": MODEL, "group": dist.group.WORLD}
    assert all(result and result.timed for result in costmodel.warmup(sizes, **options))
    with monkeypatch.context() as patch:
        patch.setattr(TuningResult, "from_dict", refuse)
        with pytest.raises(RankError, match="no room"):
            costmodel.warmup(sizes, **options)
    assert not any(ask(size).timed for size in sizes)


# --- pins and captures --------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", MODES)
def test_what_is_pinned_goes_before_what_is_agreed_on(machine: Machine, mode: str) -> None:
    agreed = warm(mode)
    chosen = next(
        c for c in SearchSpace.of(Workload.dense(*SIZE), H100).configs if c != agreed.config
    )
    costmodel.pin(chosen, *SIZE)
    assert (ask(mode=mode).config, ask(mode=mode).source) == (chosen, PINNED)
    assert warm(mode).config == chosen, "there too"
    costmodel.unpin(*SIZE)
    assert ask(mode=mode).config == agreed.config


@pytest.mark.fault("B05")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_takes_what_is_agreed_on_and_loaded(machine: Machine, mode: str) -> None:
    agreed = warm(mode)
    dispatch.forget_launches()
    machine.capturing = True
    launch = captured(machine, SIZE, mode)
    assert launch.config == agreed.config


@pytest.mark.fault("B05")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_is_torchs_where_only_something_else_is_loaded(
    machine: Machine, mode: str
) -> None:
    warm("auto")
    warm("predict")
    machine.capturing = True
    before = costmodel.stats()
    with pytest.warns(RuntimeWarning, match="captured"):
        launch = captured(machine, (700, *SIZE[1:]), mode)
    assert launch.config is None
    done = costmodel.stats().since(before)
    assert (done.makeshifts, done.predicted, done.tuned, done.loaded) == (1, 0, 0, 0)


@pytest.mark.fault("B05")
@pytest.mark.usefixtures("group")
def test_a_capture_takes_no_later_choice_that_happens_to_be_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ask()
    assert found.config is not None
    later = next(c for c, _ in found.ranked if c.binary != found.config.binary)
    monkeypatch.setattr("costmodel.dispatch.loading._loaded", {})
    costmodel.pin(later, *SIZE)
    costmodel.unpin(*SIZE)
    machine.capturing = True
    with pytest.warns(RuntimeWarning, match="captured"):
        assert captured(machine, SIZE, "auto").config is None


def captured(machine: Machine, size: tuple[int, int, int], mode: str) -> Any:
    """What a call inside a capture launches."""
    a, b = operands(*size)
    costmodel.matmul(a, b, mode=mode, model=MODEL)
    resolved = machine.take_resolved()
    assert resolved is not None
    return resolved.launch
