"""Trees that the installed XGBoost reads wrongly: an error if named, passed over if shipped."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.cli.doctor import diagnose
from costmodel.errors import MisreadModel, ModelError
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import TrainingTable, XgbCostModel, XgbParams, load, registry, use
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuner import tune

pytestmark = pytest.mark.fault("N1")

ROOT = Path(__file__).resolve().parents[2]
FILES = ["model.ubj", "config.ubj", "torch.ubj"]
PROBLEM = Workload.dense(4096, 4096, 4096)
SMALL = Workload.dense(256, 256, 256)


@pytest.fixture(scope="module")
def with_torch(
    make_training_table: Callable[..., TrainingTable], make_workloads: Any
) -> XgbCostModel:
    table = replace(
        make_training_table(make_workloads(25, 2), rows=10), torch_us=tuple(range(9, 34))
    )
    return XgbCostModel(XgbParams(rounds=4, max_depth=3)).fit(table)


@pytest.fixture
def saved(with_torch: XgbCostModel, tmp_path: Path) -> Path:
    return with_torch.save(tmp_path / "shipped" / "h100-sxm")


@pytest.fixture
def shipped(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The saved model is the only shipped one, and no warning was given yet."""
    monkeypatch.setattr(registry, "_root", lambda: saved.parent)
    monkeypatch.setattr("costmodel.validation._warned", set())
    registry._load_shipped.cache_clear()
    yield saved
    use(None)
    registry._load_shipped.cache_clear()


def misread(path: Path, *files: str) -> None:
    """Let the installed XGBoost be one that is half a logarithm off, as 3.0 was."""
    card = json.loads((path / "card.json").read_text())
    for file in files:
        card["canaries"][file] -= 0.5
    (path / "card.json").write_text(json.dumps(card))


@pytest.mark.parametrize("file", FILES)
def test_a_model_that_is_read_wrongly_is_refused(saved: Path, file: str) -> None:
    assert load(saved).hash
    misread(saved, file)
    with pytest.raises(
        MisreadModel, match=rf"{Path(file).stem}-\w+.ubj: XGBoost \d.* upgrade it"
    ) as told:
        load(saved)
    assert isinstance(told.value, ModelError)


def test_an_xgboost_that_predicts_otherwise_is_noticed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xgboost

    right = xgboost.Booster.inplace_predict
    monkeypatch.setattr(
        xgboost.Booster, "inplace_predict", lambda *a, **options: right(*a, **options) + 0.5
    )
    with pytest.raises(MisreadModel, match="upgrade it"):
        load(saved)
    with pytest.raises(MisreadModel, match="upgrade it"):
        load(ROOT / "models" / "h100-sxm")


SHIPPED = [*registry.shipped_models().values()]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_of_trees_has_a_canary(path: Path) -> None:
    card = json.loads((path / "card.json").read_text())
    assert sorted(card["canaries"]) == sorted(file.name for file in path.glob("*.ubj"))
    assert load(path).hash == card["hash"]


# --- which model answers then --------------------------------------------------------------------


def test_rules_answer_in_place_of_a_shipped_one_and_one_warning_says_why(
    shipped: Path, target: Target
) -> None:
    misread(shipped, *FILES)
    with pytest.warns(RuntimeWarning, match=r"upgrade it .* rules of thumb") as seen:
        ranking = rank(PROBLEM, target, k=5)
    assert len(seen) == 1
    assert (ranking.model, len(ranking)) == ("heuristic", 5)
    assert "upgrade it" in ranking.caveat
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said already
        assert rank(SMALL, target, k=5).model == "heuristic"
        result = tune(SMALL, runner=None, target=target, mode="predict", compile_=lambda *a: ())
    assert result.model == "heuristic"
    assert result.config is not None


def test_naming_a_model_that_is_read_wrongly_is_an_error(shipped: Path, target: Target) -> None:
    misread(shipped, "config.ubj")
    with pytest.raises(MisreadModel):
        rank(PROBLEM, target, shipped)
    with pytest.raises(MisreadModel):
        use(shipped)
    with pytest.raises(MisreadModel):
        rank(PROBLEM, target, XgbCostModel.load(shipped, parse=False))


def test_torch_is_not_predicted_by_trees_that_are_read_wrongly(
    shipped: Path, target: Target
) -> None:
    misread(shipped, "torch.ubj")
    model = XgbCostModel.load(shipped, parse=False)
    with pytest.warns(RuntimeWarning, match=r"of torch: .*torch-.*ubj: .* upgrade it"):
        assert np.isnan(model.predict_torch(PROBLEM, target))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(model.predict_torch(PROBLEM, target))


def test_doctor_says_so(shipped: Path) -> None:
    (sound,) = diagnose(only="model")
    assert sound.ok
    misread(shipped, "config.ubj")
    registry._load_shipped.cache_clear()
    (found,) = diagnose(only="model")
    assert not found.ok
    assert "config-" in found.found
    assert "ubj: XGBoost" in found.found
    assert "pip install -U xgboost" in found.advice
    assert "XGBoost" not in diagnose(only="artifacts")[0].found  # it says nothing of the kernels
