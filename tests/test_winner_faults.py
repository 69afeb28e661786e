"""Winners when something comes between: another model, or a device that does not load them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bucket_fakes import LAW, K, Law, N, ask, faked
from dispatch_fakes import Machine, find

import costmodel
from costmodel.data.candidates import CostModel
from costmodel.dispatch import dispatch
from costmodel.errors import CompileError, CostModelError, LaunchError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.models.baselines import AnalyticModel, RuleHeuristic
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield faked(monkeypatch, tmp_path)
    costmodel.use(None)


# --- another model comes to answer ----------------------------------------------------------------


class Other(Law):
    def __init__(self) -> None:
        super().__init__()
        self.name, self._hash = "other", "1" * 16


OTHER = Other()


def product(m: int, mode: str = "auto") -> None:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, mode=mode)


def all_are_by_the_models_of_their_keys() -> bool:
    entries = dispatch.winners.cache.entries()
    return all(e.key["model_hash"] == e.result.model_hash for e in entries)


@pytest.mark.parametrize("first_m", [2100, 2560])
def test_a_tuning_that_another_model_overtakes_is_of_the_one_that_began_it(
    machine: Machine, first_m: int
) -> None:
    """In the tuning itself, and while the rest of the bucket is planned."""
    costmodel.use(LAW)
    if first_m != 2100:
        product(first_m)
    machine.bench.before = lambda: costmodel.use(OTHER)
    product(2100)
    machine.bench.before = lambda: None
    assert all_are_by_the_models_of_their_keys()
    before = costmodel.stats()
    product(2100)
    assert costmodel.stats().since(before).tuned == 1, "as the other model has it"
    (kept,) = (e.result for e in dispatch.winners.cache.entries() if e.result.model == "other")
    assert kept.workload.m == 2100
    assert all_are_by_the_models_of_their_keys()


def test_never_times_nothing_where_another_model_comes_between(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for a known winner and the look for what it has for this m."""
    costmodel.use(LAW)
    product(2100)
    known = dispatch.winners.known

    def overtaken(key: TuningKey) -> TuningResult | None:
        found = known(key)
        costmodel.use(OTHER)
        return found

    monkeypatch.setattr(dispatch.winners, "known", overtaken)
    machine.bench.before = lambda: pytest.fail("something is timed")
    before = costmodel.stats()
    product(2100, "never")
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted) == (0, 1)


@pytest.mark.parametrize("model", [RuleHeuristic(), AnalyticModel(), LAW], ids=type)
@pytest.mark.parametrize("mode", ["auto", "predict", "heuristic"])
def test_where_nothing_comes_between_a_winner_is_kept(
    machine: Machine, model: CostModel, mode: str
) -> None:
    asked = Workload.dense(2100, N, K), mode, model
    found = find(*asked)
    assert find(*asked) is found
    machine.restart()
    before = costmodel.stats()
    assert find(*asked).chosen == found.chosen
    assert costmodel.stats().since(before).disk_hits == 1


@pytest.mark.fault("B16")
def test_a_winner_on_disk_under_the_key_of_another_model_is_none(machine: Machine) -> None:
    """As releases before this one may have left it."""
    found = ask(2100)
    (entry,) = dispatch.winners.cache.entries()
    dispatch.winners.cache.put({**entry.key, "model": "other", "model_hash": OTHER.hash}, found)
    machine.restart()
    before = costmodel.stats()
    assert find(Workload.dense(2100, N, K), "auto", OTHER).model == "other"
    assert costmodel.stats().since(before).tuned == 1


# --- a winner that cannot be loaded ---------------------------------------------------------------


def in_the_next_process(machine: Machine, refusal: type[CostModelError]) -> TuningResult:
    """A winner is on disk; what it returns is refused from now on."""
    winner = ask(2100)
    assert winner.config is not None
    machine.restart()
    machine.refusal = refusal
    return winner


def launched(m: int) -> GemmConfig | None:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, model=LAW)
    found = dispatch.entry_for(a, b, model=LAW)[0]
    assert found is not None
    return found.config


@pytest.mark.fault("B13")
@pytest.mark.parametrize("refusal", [CompileError, LaunchError])
def test_a_bucket_whose_winners_cannot_be_loaded_is_tuned_again_once(
    machine: Machine, refusal: type[CostModelError], caplog: pytest.LogCaptureFixture
) -> None:
    in_the_next_process(machine, refusal)
    machine.refuses = lambda _: True
    before = costmodel.stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # torch computes it
        assert {launched(m) for m in (2100, 2101, 2300, 2560, 2100)} == {None}
        assert costmodel.stats().since(before).tuned == 1
        assert caplog.text.count("tuning again") == 1
        dispatch.winners.forget()
        dispatch.forget_launches()
        launched(2100)
    assert costmodel.stats().since(before).tuned == 2, "what was forgotten is tried anew"


@pytest.mark.fault("B13")
def test_where_no_winner_can_be_loaded_the_next_best_is_launched(machine: Machine) -> None:
    winner = in_the_next_process(machine, LaunchError)
    timed = sorted((x.latency_us, c) for c, x in winner.measured if x.ok)
    allowed = {c.binary for _, c in timed[-3:]}
    machine.refuses = lambda spec: spec.config_binary not in allowed
    assert winner.config is not None
    assert winner.config.binary not in allowed
    assert {launched(m) for m in (2100, 2101)} == {timed[-3][1]}


@pytest.mark.fault("B13")
@pytest.mark.parametrize(("refusal", "stays"), [(CompileError, False), (LaunchError, True)])
@pytest.mark.parametrize("mode", ["auto", "background"])
def test_only_what_works_for_nobody_goes_from_the_disk(
    machine: Machine, refusal: type[CostModelError], stays: bool, mode: str
) -> None:
    """Whoever tunes again may die of it, or find nothing: the others still have the winner."""
    in_the_next_process(machine, refusal)
    machine.refuses = lambda _: True
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise LookupError("there is no timing now")

    machine.bench.before = fail
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # torch computes it
        if mode == "auto":
            with pytest.raises(LookupError):
                ask(2100)
        else:
            ask(2100, mode)
            assert failed.wait(60)
    assert bool(dispatch.winners.cache.entries()) == stays


def test_what_is_chosen_for_want_of_memory_is_for_this_process_alone(machine: Machine) -> None:
    winner = in_the_next_process(machine, LaunchError)
    assert winner.config is not None
    binary = winner.config.binary
    machine.refuses = lambda spec: spec.config_binary == binary
    usual = machine.bench.latency_us
    machine.bench.latency_us = lambda workload, config: (  # type: ignore[method-assign]
        1e3 if config == winner.config else usual(workload, config)
    )
    assert launched(2100) != winner.config
    assert launched(2300) != winner.config
    (kept,) = (entry.result for entry in dispatch.winners.cache.entries())
    assert kept.config == winner.config


@pytest.mark.fault("B13")
def test_a_winner_that_was_asked_for_works_again_or_is_replaced_again(machine: Machine) -> None:
    winners, m = dispatch.winners, 2100
    key = winners.key(Workload.dense(m, N, K), -1, model=LAW)
    first = winners.find(key, m)
    ask(2560)  # plans the bucket, which is no other tuning
    before = costmodel.stats()
    second = winners.replace(key, m, first, broken=True)
    assert costmodel.stats().since(before).tuned == 1
    assert winners.replace(key, m, first, broken=True) is second, "another thread has done it"
    assert winners.replace(key, m, second, broken=True) is second
    third = winners.tune(key, m)
    assert winners.replace(key, m, third, broken=True) is not third
