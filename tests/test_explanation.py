"""Explanations: the factors make the prediction, and the figures are those of the launch."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.cli import app
from costmodel.errors import InvalidInput
from costmodel.features.concepts import CONCEPTS, FEATURES_OF, OTHER, concept_of, grouped
from costmodel.features.features import FEATURES
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import RuleHeuristic, XgbCostModel, find_model, known_artifacts
from costmodel.reports.comparison import ConfigOnly
from costmodel.tuning.explanation import WITH_PTX, WITHOUT_PTX, explain
from costmodel.tuning.ranking import rank

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
SKINNY, SQUARE = Workload.dense(64, 4096, 14336), Workload.dense(2000, 3000, 4000)


@pytest.fixture(scope="module")
def shipped() -> XgbCostModel:
    model, reason = find_model(TARGET, SKINNY)
    assert isinstance(model, XgbCostModel), reason
    return model


@pytest.mark.parametrize("workload", [SKINNY, SQUARE], ids=str)
def test_the_factors_make_the_prediction(workload: Workload) -> None:
    found = explain(workload, TARGET, top=4)
    assert found.no_factors == ""
    assert len(found.rows) == 4
    for row in found.rows:
        assert row.factors is not None
        assert row.start_us is not None
        assert row.answered_by == WITH_PTX
        made_us = row.start_us * prod(row.factors.values())
        assert made_us == pytest.approx(row.predicted_us, rel=1e-4)


def test_contributions_add_up_in_a_batch_of_both_heads(shipped: XgbCostModel) -> None:
    candidates = rank(SKINNY, TARGET, shipped, 6).candidates
    columns = candidates.artifact_columns.copy()
    columns[::2] = np.nan
    mixed = replace(candidates, artifact_columns=columns)
    start_us, log_factors = shipped.contributions(SKINNY, mixed, TARGET)
    assert log_factors.shape == (6, len(FEATURES))
    made_us = start_us * np.exp(log_factors.sum(axis=1))
    np.testing.assert_allclose(made_us, shipped.predict(SKINNY, mixed, TARGET), rtol=1e-4)
    # The head that sees no binary gives its columns nothing.
    assert not log_factors[::2, FEATURES.index("registers")].any()
    assert log_factors[1::2, FEATURES.index("registers")].any()


@pytest.mark.fault("B03")
@pytest.mark.filterwarnings("ignore:.*trained with Triton:RuntimeWarning")
def test_without_artifacts_the_other_head_answers_and_says_so() -> None:
    other = Target.named("h100-sxm", Toolchain("3.6.0", "12.9"))  # whose binaries nobody knows
    (row,) = explain(SKINNY, other, top=1).rows
    assert row.answered_by == WITHOUT_PTX
    assert row.binary is None
    assert row.factors is not None
    assert row.start_us is not None
    assert row.start_us * prod(row.factors.values()) == pytest.approx(row.predicted_us, rel=1e-4)


def test_the_figures_are_those_of_the_launch() -> None:
    found = explain(SQUARE, TARGET, top=1)
    (row,) = found.rows
    assert row.predicted_us is not None
    tiles = -(-SQUARE.m // row.config.block_m) * -(-SQUARE.n // row.config.block_n)
    assert row.grid["tiles"] == tiles
    assert row.grid["blocks"] == tiles * row.config.split_k
    assert row.roofline["bound"] == "compute"
    assert row.roofline["tflops"] == pytest.approx(SQUARE.flops() / row.predicted_us / 1e6)
    assert row.roofline["percent"] == pytest.approx(100 * found.roofline_us / row.predicted_us)
    assert row.binary is not None
    assert row.binary["registers"] == row.residency["registers_per_thread"]
    estimate_us = row.paper_us["estimate"]
    assert all(0 <= us <= 1.001 * estimate_us for us in row.paper_us.values())
    assert row.paper_us["loop"] > 0


@pytest.mark.parametrize("workload", [SKINNY, SQUARE, Workload.dense(16, 256, 4096)])
def test_the_bytes_in_flight_are_those_of_the_blocks_that_run(workload: Workload) -> None:
    rows = explain(workload, TARGET).rows
    assert len(rows) == 3
    for row in rows:
        at_once = TARGET.device.sm_count * row.residency["blocks_per_multiprocessor"]
        step = (row.config.block_m + row.config.block_n) * row.config.block_k * 2
        stages = min(row.config.num_stages, row.grid["steps"])
        in_flight = min(row.grid["blocks"], at_once) * step * stages
        assert row.residency["bytes_in_flight"] == pytest.approx(in_flight)


@pytest.mark.fault("B61")
def test_a_binary_that_spills_is_said_to(shipped: XgbCostModel) -> None:
    """By the bytes that ptxas counted, which is what makes such a configuration slow."""
    workload = Workload.dense(4096, 4096, 4096)
    known = known_artifacts(shipped, TARGET)
    keys = {
        c: artifact_key(specialize(workload, c), TARGET) for c in rank(workload, TARGET).configs
    }
    spilled = {c: known[key].spill_bytes for c, key in keys.items() if key in known}
    config = max(spilled, key=spilled.__getitem__)
    assert spilled[config] > 500
    arguments = ["explain", "4096", "4096", "4096", "--target", "h100-sxm"]
    result = CliRunner().invoke(app, [*arguments, "--against", str(config)])
    assert result.exit_code == 0, result.stderr
    assert f"{spilled[config]} bytes spilled" in " ".join(result.stdout.split())
    assert "no spills" in result.stdout, "the first one"


def test_what_limits_the_blocks_is_named() -> None:
    limits = {
        str(row.residency["limited_by"])
        for workload in (SKINNY, SQUARE, Workload.dense(1, 1000, 1000))
        for row in explain(workload, TARGET, places=range(1, 400, 7)).rows
    }
    assert {"shared memory", "registers"} <= limits
    assert limits <= {
        "shared memory", "registers", "registers and shared memory", "warps",
        "the kernel, which starts one block on each",
    }  # fmt: skip


@pytest.mark.fault("B03")
@pytest.mark.parametrize("model", [RuleHeuristic(), "blind"])
def test_a_model_without_reasons_is_explained_on_paper(
    model: RuleHeuristic | str, shipped: XgbCostModel
) -> None:
    found = explain(SKINNY, TARGET, ConfigOnly(shipped) if isinstance(model, str) else model)
    assert "only a trained model" in found.no_factors
    assert all(row.factors is None and row.answered_by == "" for row in found.rows)
    assert found.rows[0].grid["waves"]
    assert found.to_dict()["explained"][0]["factors"] is None


@pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning")
@pytest.mark.parametrize("target", ["h100-sxm", "a100-sxm", "b200-sxm"])
@pytest.mark.parametrize(
    "workload",
    [
        Workload.dense(1, 1, 1),
        Workload.dense(4096, 4096, 1, a_layout="col"),
        Workload.dense(33, 77, 555, "float32"),
        Workload.dense(33, 7776, 555, "float32", tf32=True, b_layout="col"),
        Workload.dense(64, 512, 512, "bfloat16", bias=True, activation="gelu", out_dtype="float32"),
        Workload.dense(200_000, 100_000, 64),
    ],
    ids=str,
)
def test_whatever_can_be_ranked_can_be_explained(workload: Workload, target: str) -> None:
    found = explain(workload, Target.named(target, TARGET.toolchain), top=2)
    assert bool(found.no_factors) == all(row.factors is None for row in found.rows)
    for row in found.rows:
        assert 0 < row.grid["useful_percent"] <= 100  # type: ignore[operator]
        assert row.residency["bytes_wanted"] > 0  # type: ignore[operator]
        if row.predicted_us is not None:
            assert row.roofline["percent"] > 0  # type: ignore[operator]
        values = [v for part in row.to_dict().values() if isinstance(part, dict)
                  for v in part.values() if isinstance(v, float)]  # fmt: skip
        assert np.isfinite(values).all()


def test_splitting_k_has_its_price() -> None:
    rows = explain(SKINNY, TARGET, places=range(1, 40)).rows
    split = next(row for row in rows if row.config.split_k > 1)
    whole = next(row for row in rows if row.config.split_k == 1)
    assert split.traffic["split_k_us"]
    assert whole.traffic["split_k_us"] == whole.traffic["split_k_bytes"] == 0


def test_places_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidInput, match="distinct configurations"):
        explain(SKINNY, TARGET, places=[1, 10**6])
    with pytest.raises(InvalidInput, match="a place"):
        explain(SKINNY, TARGET, places=[0])
    for places in ([], (), range(0), 5, {1}):
        with pytest.raises(InvalidInput, match="places"):
            explain(SKINNY, TARGET, places=places)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="top"):
        explain(SKINNY, TARGET, top=0)


def test_one_can_be_set_against_the_first() -> None:
    ranking = rank(SKINNY, TARGET)
    rows = explain(SKINNY, TARGET, against=ranking.configs[30]).rows
    assert [row.place for row in rows] == [1, 31]
    assert len(explain(SKINNY, TARGET, against=ranking.configs[0]).rows) == 1
    named = explain(SKINNY, TARGET, against=str(ranking.configs[30]))
    assert [row.to_dict() for row in named.rows] == [row.to_dict() for row in rows]
    for wrong in ("tma 64x32", "", 5, None.__class__, ["tma"]):
        with pytest.raises(InvalidInput, match="'tma 128x256x64 w8 s4 g8'"):
            explain(SKINNY, TARGET, against=wrong)  # type: ignore[arg-type]
    giant = GemmConfig("pointer", 1024, 1024, 256)
    with pytest.raises(InvalidInput, match="is not in the ranking"):
        explain(SKINNY, TARGET, against=giant)


def test_every_feature_has_a_concept_and_concepts_name_features_only() -> None:
    assert [name for name in FEATURES if concept_of(name) == OTHER] == []
    named = [name for names in FEATURES_OF.values() for name in names.split()]
    assert len(set(named)) == len(named)
    assert set(named) <= set(FEATURES)
    assert concept_of("no such feature") == OTHER


def test_groups_keep_the_sum_and_the_order() -> None:
    values = [float(i) for i, _ in enumerate(FEATURES)]
    found = grouped(FEATURES, values)
    assert sum(found.values()) == sum(values)
    assert list(found) == [concept for concept in CONCEPTS if concept in found]


def test_a_place_and_another_configuration_do_not_go_together() -> None:
    arguments = ["explain", "64", "4096", "14336", "50", "--against", "tma 64x32x128 w4 s6 g8"]
    result = CliRunner().invoke(app, [*arguments, "--target", "h100-sxm"])
    assert result.exit_code == 2
    assert "--against" in result.output
