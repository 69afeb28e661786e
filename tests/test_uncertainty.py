"""How sure a ranking is: the power law, how many to time by it, and what lies outside."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InvalidInput
from costmodel.evaluation.coverage import Coverage, kind_of
from costmodel.evaluation.uncertainty import (
    LIMIT,
    NEAR,
    Confidence,
    LossLaw,
    Signals,
    Uncertainty,
    in_words,
    require_top,
)
from costmodel.gemm.workload import Workload

LAW = LossLaw(-1.2, 1.1, -0.8)
SEEN = Coverage.of([Workload.dense(16, 256, 128), Workload.dense(4096, 8192, 1024)])
KNOWN = Uncertainty(LAW, LossLaw(-3.5, 0.0, -0.7), 0.1, SEEN)
INSIDE = Workload.dense(512, 512, 512)

losses = st.floats(1e-6, 1.0)
slopes = st.floats(-3.0, -0.01)


@given(losses, slopes)
def test_more_timings_are_expected_to_keep_more(loss: float, slope: float) -> None:
    kept = [Confidence(loss, slope).kept_at(k) for k in range(1, LIMIT + 1)]
    assert all(a <= b for a, b in pairwise(kept))
    assert 0 <= kept[0] <= kept[-1] <= 1


@given(losses, losses, slopes)
def test_the_less_sure_the_more_is_timed(one: float, other: float, slope: float) -> None:
    less, more = sorted((one, other))
    assert 1 <= Confidence(less, slope).k <= Confidence(more, slope).k <= LIMIT


@given(losses, slopes)
def test_a_doubt_raises_the_number_within_the_limit(loss: float, slope: float) -> None:
    sure, unsure = Confidence(loss, slope), Confidence(loss, slope, "never seen")
    assert unsure.k == max(16, min(LIMIT, 2 * sure.k))
    assert sure.sure
    assert not unsure.sure


@given(losses, slopes, st.floats(1e-5, 1e-2))
def test_the_next_timing_is_not_worth_its_price_and_the_last_was(
    loss: float, slope: float, price: float
) -> None:
    found = Confidence(loss, slope)
    k = found.worth(price)
    tolerance = 1e-12
    if k < LIMIT:
        assert found.kept_at(k + 1) - found.kept_at(k) <= price + tolerance
    if k > 1:
        assert found.kept_at(k) - found.kept_at(k - 1) >= price - tolerance


def test_the_signals_are_of_the_head_of_the_ranking() -> None:
    cost = np.exp(np.linspace(0, 1, 100))
    agrees = cost[:NEAR] * 1.3  # a common factor is no disagreement
    found = Signals.of(cost, agrees)
    assert found.disagreement == pytest.approx(0, abs=1e-12)
    assert found.spread == pytest.approx(NEAR / 99)
    shaken = cost[:NEAR] * np.exp(np.tile([0.05, -0.05], NEAR // 2))
    assert Signals.of(cost, shaken).disagreement == pytest.approx(0.05)
    assert np.isnan(Signals.of(cost, None).disagreement)
    assert Signals.of(cost[:1], cost[:1]).spread == 0


def test_heads_that_disagree_about_candidates_that_are_close_lose_more() -> None:
    near = LAW.loss(Signals(0.05, 0.1))
    assert LAW.loss(Signals(0.01, 0.1)) < near
    assert LAW.loss(Signals(0.05, 0.4)) < near
    assert LAW.loss(Signals(10.0, 0.0)) == 1.0, "nothing loses more than all"


def test_each_head_has_its_law() -> None:
    both = KNOWN.confidence(Signals(0.01, 0.2), "")
    one = KNOWN.confidence(Signals(nan, 0.2), "")
    assert both is not None
    assert one is not None
    assert (both.slope, one.slope) == (-0.8, -0.7)
    assert replace(KNOWN, config=None).confidence(Signals(nan, 0.2), "") is None


def test_heads_that_disagree_more_than_ever_are_a_doubt() -> None:
    found = KNOWN.confidence(Signals(0.2, 0.2), "")
    assert found is not None
    assert "two heads disagree by 20.0 %" in found.doubt
    first = KNOWN.confidence(Signals(0.2, 0.2), "n is large")
    assert first is not None
    assert first.doubt == "n is large"


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (INSIDE, ""),
        (Workload.dense(16, 8192, 1024), ""),
        (Workload.dense(8, 512, 512), "m = 8 is beyond what the model has seen (16 to 4096)"),
        (Workload.dense(512, 200_000, 512), "n = 200000 is beyond"),
        (Workload.dense(512, 512, 2048), "k = 2048 is beyond"),
        (Workload.dense(512, 512, 512, b_layout="col"), "B col-major aligned"),
        (Workload.dense(512, 511, 512), "B row-major unaligned"),
        (Workload.dense(512, 512, 512, out_dtype="float32"), "wider than the operands"),
        (Workload.dense(512, 512, 512, "bfloat16"), ""),
    ],
    ids=str,
)
def test_what_lies_outside_the_training_is_said(workload: Workload, words: str) -> None:
    doubt = SEEN.doubt(workload)
    assert words in doubt
    assert bool(words) == bool(doubt)


def test_kinds_are_counted() -> None:
    many = Coverage.of([INSIDE, INSIDE, Workload.dense(512, 511, 512)])
    assert many.kinds[kind_of(INSIDE)] == 2
    assert len(many.kinds) == 2


def test_json_and_back() -> None:
    for known in (KNOWN, replace(KNOWN, ptx=None)):
        text = json.dumps(known.to_dict(), allow_nan=False)
        assert Uncertainty.from_dict(json.loads(text)) == known


@pytest.mark.parametrize(
    "change",
    [
        {"ptx": {"intercept": 1.0}},
        {"ptx": [1.0]},
        {"config": {**KNOWN.to_dict()["config"], "slope": 0.5}},
        {"config": {**KNOWN.to_dict()["config"], "slope": "__import__('os')"}},
        {"most_disagreement": None},
        {"coverage": {}},
        {"coverage": {**SEEN.to_dict(), "least": [1, 2]}},
        {"coverage": {**SEEN.to_dict(), "most": [1, 2, "3"]}},
        {"coverage": {**SEEN.to_dict(), "kinds": {"A": 1.5}}},
    ],
    ids=str,
)
def test_what_is_not_its_json_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Uncertainty.from_dict(KNOWN.to_dict() | change)
    without = {k: v for k, v in KNOWN.to_dict().items() if k not in change}
    with pytest.raises(InvalidInput):
        Uncertainty.from_dict(without)


def test_how_many_is_a_count_or_auto() -> None:
    assert require_top("k", "auto") == "auto"
    assert require_top("k", 3) == 3
    for wrong in ("many", "", 0, -1, True, 2.5, None):
        with pytest.raises(InvalidInput, match="k="):
            require_top("k", wrong)


def test_in_words() -> None:
    assert in_words(0.9972, "", 8) == (
        "the best of the first 8 is expected to keep 99.7 % of the speed"
    )
    assert in_words(0.9972, "m is large", 8) == "unsure: m is large"
    assert in_words(None, "", 8) == ""
