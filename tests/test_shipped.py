"""The recorded data and the trained model that the repository ships, held to what is said of them.

Where one is missing the tests fail: it was forgotten in a commit.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import triton
from typer.testing import CliRunner

from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Role
from costmodel.evaluation.heldout import eval_workloads, is_held_out
from costmodel.gemm.specialize import compile_many, kernel_hashes
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.replay import ReplayRunner
from costmodel.models import XgbCostModel, load
from costmodel.tuning.ranking import rank

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NAME = "h100-sxm"
SIBLING = "h200-sxm"


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.open(ROOT / "datasets" / NAME)


@pytest.fixture(scope="module")
def sibling() -> Dataset:
    """Of another card that runs the same binaries."""
    return Dataset.open(ROOT / "datasets" / SIBLING)


@pytest.fixture(scope="module")
def model() -> XgbCostModel:
    return load(ROOT / "models" / NAME)


@pytest.fixture(scope="module")
def evaluated() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["evaluate", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return {entry["name"]: entry for entry in json.loads(result.stdout)}


def test_the_dataset_is_what_its_card_counts(dataset: Dataset) -> None:
    card = json.loads((dataset.path / "card.json").read_text())
    counts, table = card["counts"], dataset.measurements()
    assert counts["artifacts"] == len(dataset.artifacts())
    for role in get_args(Role):
        assert counts["workloads"][role] == len(dataset.workloads(role))
        assert counts["rows"][role] == dict(Counter(table.status[table.role == role].tolist()))
    assert counts["devices"] == sorted({run.device_uuid for run in dataset.measurements().runs})
    assert card["target"]["device"]["name"] == NAME


def test_what_there_is_to_learn_from_is_whole(dataset: Dataset) -> None:
    frame = dataset.frame("train", kernel_hashes=kernel_hashes())
    assert frame.dropped == {}
    each = np.bincount(frame.workload_index[frame.ok], minlength=len(frame.workloads))
    assert np.median(each) >= 150
    assert {w.code.dtype for w in frame.workloads} == {"float16", "bfloat16"}


def test_there_is_as_much_to_learn_from_as_was_planned(dataset: Dataset, sibling: Dataset) -> None:
    frame, more = dataset.frame("train"), sibling.frame("train")
    assert frame.ok.sum() >= 230_000
    assert len(frame.workloads) >= 900
    assert frame.ok.sum() + more.ok.sum() >= 330_000


def test_nothing_that_is_judged_by_is_learned_from(dataset: Dataset) -> None:
    assert [w for w in dataset.workloads("train") if is_held_out(w)] == []


def test_another_card_has_the_eval_list_too_and_something_to_learn_from(sibling: Dataset) -> None:
    assert set(sibling.workloads("eval")) == set(eval_workloads())
    assert len(sibling.workloads("train")) >= 400
    assert not any(is_held_out(w) for w in sibling.workloads("train"))


def test_both_cards_are_ranked_for_by_one_model(model: XgbCostModel) -> None:
    assert model.card.devices == (NAME, SIBLING)
    target = Target.named(SIBLING, model.card.target.toolchain)
    found = rank(Workload.dense(4096, 4096, 4096), target, None, 8)
    assert found.model == model.name
    assert found.without_artifact == 0
    assert found.caveat == ""
    here = rank(Workload.dense(16, 28672, 4096), Target.named(NAME), None, 1).predicted_us(0)
    there = rank(Workload.dense(16, 28672, 4096), target, None, 1).predicted_us(0)
    assert here is not None
    assert there is not None
    assert there < here, "device memory is faster there"


def test_the_eval_list_is_measured(dataset: Dataset) -> None:
    assert set(dataset.workloads("eval")) == set(eval_workloads())


def test_eval_workloads_have_torch_beside_them(dataset: Dataset) -> None:
    assert set(dataset.workloads("eval")) <= set(eval_workloads())
    for workload in dataset.workloads("eval"):
        torch = dataset.torch(workload)
        assert torch is not None
        assert torch.ok
        assert any(m.ok for m in dataset.recorded(workload).values())


@pytest.mark.fault("B46")
@pytest.mark.slow
def test_shipped_artifacts_compile_to_the_same_ptx(dataset: Dataset) -> None:
    made_with = dataset.target.toolchain.triton
    if triton.__version__ != made_with and not os.environ.get("CI"):
        pytest.skip(f"compiled with Triton {made_with}, this is {triton.__version__}")
    table = dataset.artifacts()
    ok = sorted(key for key in table if table[key].ok)
    chosen = {key: table[key] for key in random.Random(0).sample(ok, 20)}
    made = compile_many([a.spec for a in chosen.values()], dataset.target)
    found = {artifact.key: artifact.ptx_hash for artifact in made}
    assert found == {key: artifact.ptx_hash for key, artifact in chosen.items()}


def test_the_model_was_trained_on_these_datasets(
    dataset: Dataset, sibling: Dataset, model: XgbCostModel
) -> None:
    assert model.card.target == dataset.target
    both = (dataset, sibling)
    assert model.card.training["rows"] == sum(d.frame("train").ok.sum() for d in both)
    assert model.artifacts is not None
    for each in both:
        used = set(each.measurements("train").artifact_keys) - {""}  # torch has none
        assert set(model.artifacts) >= used


def test_the_model_keeps_the_speed_that_is_claimed(
    evaluated: dict[str, Any], model: XgbCostModel, dataset: Dataset
) -> None:
    kept = evaluated[model.name]["regret"]
    assert evaluated[model.name]["workloads"] == len(dataset.workloads("eval"))
    assert kept["1"]["geomean_pct"] >= 98.5
    assert kept["8"]["geomean_pct"] >= 99.8
    assert evaluated[model.name]["kendall_tau"] >= 0.92


def test_every_baseline_is_in_the_table(evaluated: dict[str, Any]) -> None:
    names = {"random", "static", "heuristic", "estimate", "ptx-score", "ptx-score-hopper", "oracle"}
    assert set(evaluated) >= names
    for name in names - {"oracle"}:
        assert evaluated[name]["kind"] == "baseline"


def test_rank_answers_from_the_shipped_model(model: XgbCostModel) -> None:
    arguments = ["rank", "4096", "4096", "4096", "--target", NAME, "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["model"] == {"name": model.name, "hash": model.hash}
    assert len(found["ranked"]) == 8
    assert all(row["predicted_us"] > 0 for row in found["ranked"])


def test_the_sample_of_the_wheel_can_be_replayed() -> None:
    sample = Dataset.open(ROOT / "models" / NAME / "replay")
    runner = ReplayRunner(sample)
    for workload in sample.workloads():
        assert runner.measure_torch(workload).ok
        assert runner.configs(workload)
    assert (1024, 4096, 4096) in {(w.m, w.n, w.k) for w in sample.workloads()}
