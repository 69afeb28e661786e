"""A forest predicts what XGBoost does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.models.forest import Forest


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 40), st.booleans())
def test_it_predicts_what_xgboost_does(seed: int, depth: int, rounds: int, gaps: bool) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(200, 6)).astype(np.float32).round(1)  # with ties
    if gaps:
        values[random.random(values.shape) < 0.2] = np.nan
    label = np.nan_to_num(values).sum(axis=1) + 3
    booster = xgboost.train(
        {"max_depth": depth, "seed": seed % 1000, "nthread": 1},
        xgboost.DMatrix(values, label), rounds,
    )  # fmt: skip
    raw = bytes(booster.save_raw(raw_format="ubj"))
    values[::7] = np.nan
    found = Forest.of(raw).predict(values)
    np.testing.assert_allclose(found, booster.inplace_predict(values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("golden/trees-*.ubj")))
def test_it_reads_what_other_releases_have_written(path: Path) -> None:
    booster = xgboost.Booster()
    booster.load_model(path)
    values = np.random.default_rng(0).normal(size=(50, booster.num_features())).astype(np.float32)
    expected = booster.inplace_predict(values)
    np.testing.assert_allclose(Forest.of(path.read_bytes()).predict(values), expected, rtol=1e-4)
