"""What computes the other m of a bucket: what is expected to be fastest there, little of it new."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_fakes import H100, Machine
from numpy.typing import NDArray

import costmodel
from costmodel import dispatch, winners
from costmodel.candidates import Candidates
from costmodel.config import GemmConfig
from costmodel.errors import InvalidInput
from costmodel.measurement import Measurement
from costmodel.models import XgbCostModel
from costmodel.ranking import rank
from costmodel.space import legality
from costmodel.spread import spread
from costmodel.target import Target
from costmodel.tuning_result import Part, TuningResult
from costmodel.workload import Workload

N, K = 1024, 2048
ROWS = (2049, 2560)
ROOT = Path(__file__).resolve().parents[1]


class Law(XgbCostModel):
    """Whole waves of tiles, larger tiles being the more efficient: it knows all, if asked."""

    asked = 0

    def __init__(self) -> None:
        super().__init__(name="law")
        self.target_, self.dtypes_, self._hash = H100, ("float16",), "0" * 16
        self._directory = ROOT / "models/h100-sxm"  # for the binaries that are known

    def nearest(
        self, workload: Workload, candidates: Candidates, target: Target, count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        Law.asked += 1
        cost = [law_us(workload, config) for config in candidates.configs]
        return np.arange(len(candidates)), np.array(cost)

    def predict_torch(self, workload: Workload, target: Target) -> float:
        return 1.1 * law_us(workload, GemmConfig("pointer", 128, 128, 32))


def law_us(workload: Workload, config: GemmConfig) -> float:
    tiles = -(-workload.m // config.block_m) * -(-workload.n // config.block_n)
    waves = -(-tiles * config.split_k // H100.device.sm_count)
    area = config.block_m * config.block_n
    split = 1 + 0.3 * (config.split_k > 1)
    own = 1 + len(str(config)) / 1e4 + config.group_m / 1e5  # so that no two are equal
    return 3 + split * own * waves * (area + 3000) * workload.k / config.split_k / 3e6


def tuned(m: int, k: int = 8, *, torch_us: float | None = None, timed: bool = True) -> TuningResult:
    """The top k, timed: all take 20 % longer than the law has it."""
    workload = Workload.dense(m, N, K)
    configs = rank(workload, H100, Law(), k).configs
    source = {"source": "device (h100-sxm)"} if timed else {}
    found = TuningResult.unranked(workload, H100, "auto", configs[0], "", **source)
    found = replace(found, model_hash=Law().hash)
    if not timed:
        return found
    measured = tuple((c, Measurement("ok", 1.2 * law_us(workload, c))) for c in configs)
    return replace(
        found, measured=measured, reliable=True,
        torch=None if torch_us is None else Measurement("ok", torch_us),
    )  # fmt: skip


def best_us(workload: Workload) -> float:
    return float(rank(workload, H100, Law(), 1).cost[0])


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("m", [2049, 2300, 2560])
def test_every_part_is_computed_by_nearly_the_best(m: int, timed: bool) -> None:
    result = tuned(m, timed=timed)
    result = replace(result, parts=spread(result, ROWS, Law()))
    lasts = [part.last for part in result.parts]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == ROWS[1]
    worst_alone = 1.0
    for last in range(ROWS[0] + 63, ROWS[1] + 1, 64):
        workload = Workload.dense(last, N, K)
        config = result.at(last).config
        assert config is not None
        assert not legality(config, workload, H100.device)
        assert law_us(workload, config) <= 1.021 * best_us(workload)
        assert result.config is not None
        worst_alone = max(worst_alone, law_us(workload, result.config) / best_us(workload))
    assert worst_alone > 1.1, "else one winner would do for all"


def test_what_is_there_is_taken_unless_something_new_gains_more_than_predictions_err() -> None:
    """With all of the space timed nothing is new; with one configuration timed most is."""
    every, one = tuned(2049, 10**6), tuned(2049, 1)
    for result in (every, one):
        parts = spread(result, ROWS, Law())
        there = {config for config, _ in result.measured}
        for part in parts:
            workload = Workload.dense(part.last, N, K)
            if part.config not in there:
                assert result is one
                assert part.config is not None
                gained = min(law_us(workload, c) for c in there) / law_us(workload, part.config)
                assert gained > 1.02


def test_timings_count_for_more_than_what_was_predicted_of_them() -> None:
    """The second choice takes a tenth of what was predicted: so it will elsewhere."""
    result = tuned(2049)
    _, second, *_ = (config for config, _ in result.measured)
    measured = dict(result.measured)
    measured[second] = Measurement("ok", 0.1 * law_us(result.workload, second))
    result = replace(result, config=second, measured=tuple(measured.items()))
    assert spread(result, ROWS, Law()) == (Part(ROWS[1], second),)


@pytest.mark.parametrize("status", ["wrong_result", "crashed", "too_slow", "compile_error"])
def test_what_failed_where_it_was_tuned_is_chosen_nowhere(status: Any) -> None:
    result = tuned(2049)
    failed, *rest = result.measured
    measured = ((failed[0], Measurement(status)), *rest)
    result = replace(result, config=rest[0][0], measured=measured)
    parts = spread(result, ROWS, Law())
    assert failed[0] not in {part.config for part in parts}


def test_what_is_not_known_to_compile_is_not_new() -> None:
    law = Law()
    law._directory = None
    result = tuned(2049)
    there = {config for config, _ in result.measured}
    assert {part.config for part in spread(result, ROWS, law)} <= there


def test_torch_is_taken_where_it_is_expected_to_be_faster_by_more_than_it_varies() -> None:
    torch_us = 1.2 * 1.1 * law_us(Workload.dense(2049, N, K), GemmConfig("pointer", 128, 128, 32))
    for factor, expected in ((0.1, {None}), (10.0, None)):
        result = tuned(2049, torch_us=factor * torch_us)
        chosen = {part.config for part in spread(result, ROWS, Law())}
        assert chosen == expected if expected else None not in chosen


def test_torch_predicted_is_torch_for_all() -> None:
    result = replace(tuned(2049, timed=False), config=None)
    assert spread(result, ROWS, Law()) == (Part(ROWS[1], None),)


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 4), (2**30 + 1, 2**30 + 7)])
def test_buckets_of_any_size_have_parts(rows: tuple[int, int]) -> None:
    small = Workload.dense(rows[0], 1, 1)
    config = rank(small, H100, Law(), 1).configs[0]
    parts = spread(TuningResult.unranked(small, H100, "predict", config, ""), rows, Law())
    assert parts[-1].last == rows[1]
    assert len(parts) <= 8


# --- the result ---------------------------------------------------------------------------------


def test_another_m_has_its_own_choice_and_says_why() -> None:
    a, b, c = (GemmConfig("pointer", side, 64, 32) for side in (16, 32, 64))
    base = TuningResult.unranked(Workload.dense(40, N, K), H100, "auto", a, "fastest")
    result = replace(base, parts=(Part(48, b), Part(56, None), Part(64, c)))
    assert [result.at(m).config for m in (33, 40, 48, 49, 57, 64)] == [b, a, b, None, c, c]
    assert result.at(40) is result
    assert str(a) in result.at(49).why
    assert result.at(65).config == a, "past the bucket"
    assert TuningResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize(
    "parts",
    [5, {}, [5], [{}], [{"last": "a", "config": "torch"}], [{"last": 0, "config": "torch"}],
     [{"last": 5, "config": "cublas"}], [{"last": 5, "config": {}}], [{"last": 5}]],
    ids=str,
)  # fmt: skip
def test_parts_of_another_kind_are_refused(parts: Any) -> None:
    data = tuned(2049, 1).to_dict() | {"parts": parts}
    with pytest.raises(InvalidInput, match="not a tuning result"):
        TuningResult.from_dict(data)


# --- calls --------------------------------------------------------------------------------------

LAW = Law()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setattr("dispatch_fakes.FakeLaunch.__call__", lambda *_: None)
    return Machine(monkeypatch, tmp_path)


def ask(m: int, mode: str = "auto") -> TuningResult:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, mode=mode, model=LAW)
    found = costmodel.result_for(a, b, mode=mode, model=LAW)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["auto", "predict"])
def test_a_bucket_is_tuned_once_and_each_m_has_what_is_fastest(machine: Machine, mode: str) -> None:
    before = costmodel.stats()
    found = {m: ask(m, mode) for m in range(2060, 2561, 50)}
    done = costmodel.stats().since(before)
    assert done.tuned + done.predicted == 1
    assert len({result.chosen for result in found.values()}) > 1
    if mode == "predict":
        for m, result in found.items():
            assert result.config is not None
            assert law_us(Workload.dense(m, N, K), result.config) < 1.1 * best_us(
                Workload.dense(m, N, K)
            )


def test_a_later_process_finds_the_parts_on_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {m: ask(m).chosen for m in (2060, 2300, 2560)}
    machine.restart()
    monkeypatch.setattr(winners, "spread", lambda *_: pytest.fail("worked out again"))
    assert {m: ask(m).chosen for m in found} == found


def test_a_single_m_is_never_spread(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "spread", lambda *_: pytest.fail("nobody asked"))
    assert ask(2300) is ask(2300)


def test_what_cannot_be_loaded_gives_way_to_the_winner(machine: Machine) -> None:
    winner = ask(2060)
    assert winner.config is not None
    machine.refuses = lambda spec: spec.config_binary != winner.config.binary
    for m in (2300, 2560):
        ask(m)
    launches = {launch.config for launch, *_ in dispatch._launches.young.values()}
    assert launches == {winner.config}


@pytest.mark.parametrize("mode", ["auto", "predict", "never", "background"])
@pytest.mark.parametrize("m", [2060, 2560])
def test_after_warmup_no_m_of_the_bucket_compiles_or_loads(
    machine: Machine, m: int, mode: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("costmodel.warming._blank_operands", blank_operands)
        patch.setattr("costmodel.warming.Target.current", lambda *_: H100)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        costmodel.warmup([(m, N, K)], mode=mode, model=LAW)
    before = costmodel.stats()
    chosen = {ask(any_m, mode).chosen for any_m in range(2049, 2561, 17)}
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.compiled, done.loaded) == (0, 0, 0, 0)
    assert len(chosen) > 1


def test_never_takes_what_its_part_has(machine: Machine) -> None:
    winner = ask(2060)
    machine.restart()
    assert ask(2060, "never").config == winner.config
    chosen = ask(2560, "never").config
    machine.restart()
    assert chosen == ask(2560).config != winner.config


def test_what_cannot_be_written_can_still_be_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2060), ask(3000)
    machine.restart()
    timed = len(machine.bench.timed)

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("costmodel.cache.replace_file", refuse)
    with pytest.warns(RuntimeWarning, match="Read-only"):
        ask(2300)
    ask(3000)
    assert len(machine.bench.timed) == timed, "it is on disk"


def blank_operands(workload: Workload, index: int) -> tuple[torch.Tensor, ...]:
    shapes = (workload.m, workload.k), (workload.k, workload.n), (workload.m, workload.n)
    return (*(torch.empty(s, dtype=torch.float16) for s in shapes), None)  # type: ignore[return-value]


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


def test_in_the_background_no_call_waits_for_another_part(machine: Machine) -> None:
    loaded_by: set[int] = set()
    machine.refuses = lambda _: bool(loaded_by.add(threading.get_ident()))
    chosen = set()
    for m in (2060, 2300, 2560):
        deadline = time.monotonic() + 30
        while not (found := launched(m)) or found.config != expected(m):
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.005)
        chosen.add(found.config)
    assert len(chosen) > 1
    assert threading.get_ident() not in loaded_by


def launched(m: int) -> TuningResult | None:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, mode="background", model=LAW)
    return costmodel.result_for(a, b, mode="background", model=LAW)


def expected(m: int) -> GemmConfig | str | None:
    """What a bucket that was tuned, and spread, has for an m."""
    question = winners.Question(Workload.dense(m, N, K), -1, "auto", LAW)
    found = dispatch.winners.known(question)
    if found is None or not dispatch.winners.covers(question, found):
        return "not known yet"
    return found.at(m).config
