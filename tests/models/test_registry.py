"""Models on disk and which one answers: nothing unsafe runs, nothing is silently wrong."""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.data.candidates import Candidates
from costmodel.errors import (
    CorruptFile,
    CostModelError,
    FileError,
    NoModel,
    SchemaMismatch,
    WrongVersion,
)
from costmodel.features import features
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import (
    RuleHeuristic,
    XgbCostModel,
    XgbParams,
    find_model,
    load,
    registry,
    shipped_models,
    storage,
    use,
)
from costmodel.models.trees import Trees

GOLDEN = Path(__file__).parents[1] / "golden"
LARGE = Workload.dense(4096, 4096, 4096)


@pytest.fixture
def saved(trained: XgbCostModel, tmp_path: Path) -> Path:
    return trained.save(tmp_path / "model")


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of shipped models, nothing in use, no warning given yet."""
    root = tmp_path / "shipped"
    root.mkdir()
    monkeypatch.setattr(registry, "_root", lambda: root)
    monkeypatch.setattr("costmodel.validation._warned", set())
    yield root
    use(None)
    registry._load_shipped.cache_clear()


def part(path: Path, name: str) -> Path:
    """The file of a part, which is named by its content; the card itself is no part."""
    files = json.loads((path / "card.json").read_text())["files"]
    return path / files.get(name, name)


def edit_card(path: Path, **changes: Any) -> None:
    card = json.loads((path / "card.json").read_text())
    (path / "card.json").write_text(json.dumps(card | changes))


class Payload:
    """Unpickling this makes a folder."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


# --- Saving and loading ------------------------------------------------------------------------


@pytest.mark.fault("B54")
def test_a_saved_model_predicts_as_before(
    saved: Path, trained: XgbCostModel, target: Target, make_batch: Callable[..., Candidates]
) -> None:
    model = load(saved)
    for artifacts in (True, False):
        batch = make_batch(LARGE, 50, artifacts=artifacts)
        np.testing.assert_array_equal(
            model.predict(LARGE, batch, target), trained.predict(LARGE, batch, target)
        )
    assert (model.name, model.hash, model.params) == (trained.name, trained.hash, trained.params)
    assert model.card.target == trained.card.target


@pytest.mark.fault("B53", "B54")
def test_only_json_and_ubj_are_written(saved: Path) -> None:
    names = sorted(re.sub("-[0-9a-f]{16}", "", f.name) for f in saved.iterdir())
    assert names == ["card.json", "config.ubj", "model.ubj"]
    card = json.loads((saved / "card.json").read_text())
    assert card["training"]["dropped"] == {"timeout": 120}
    for name in ("model.ubj", "config.ubj"):
        data = part(saved, name).read_bytes()
        assert data.startswith(b"{L")  # UBJ: an object whose first key has a 64-bit length
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(data)


def test_the_trees_are_read_when_they_are_asked(
    saved: Path, trained: XgbCostModel, target: Target, make_batch: Callable[..., Candidates]
) -> None:
    data = {name: part(saved, name).read_bytes() for name in ("model.ubj", "config.ubj")}
    files = {name: part(saved, name) for name in data}
    for file in files.values():
        file.unlink()
    model = XgbCostModel.load(saved, parse=False)
    assert model.hash == trained.hash
    for name, file in files.items():
        file.write_bytes(data[name])
    batch = make_batch(LARGE, 50)
    np.testing.assert_array_equal(
        model.predict(LARGE, batch, target), trained.predict(LARGE, batch, target)
    )


def test_trees_that_changed_since_the_card_was_read_are_refused(
    saved: Path, target: Target, make_batch: Callable[..., Candidates]
) -> None:
    model = XgbCostModel.load(saved, parse=False)
    part(saved, "config.ubj").write_bytes(part(saved, "config.ubj").read_bytes() + b" ")
    with pytest.raises(CorruptFile, match="not those of card"):
        model.predict(LARGE, make_batch(LARGE, 50), target)
    assert "not those of card" in model.why_not_usable(LARGE, target), (
        "from then on it is passed over"
    )


def test_a_loaded_model_can_be_saved_over_itself(saved: Path) -> None:
    before = load(saved).hash
    XgbCostModel.load(saved, parse=False).save(saved)
    assert load(saved).hash == before


def test_a_loaded_model_needs_its_files_no_more(saved: Path, tmp_path: Path) -> None:
    model = load(saved)
    for name in ("model.ubj", "config.ubj"):
        part(saved, name).unlink()
    assert load(model.save(tmp_path / "elsewhere")).hash == model.hash


@pytest.mark.fault("B53")
def test_a_card_that_lies_about_the_trees_is_not_gone_by(
    saved: Path, target: Target, make_batch: Callable[..., Candidates]
) -> None:
    card = json.loads((saved / "card.json").read_text())
    edit_card(saved, params=card["params"] | {"rounds": 10**6})
    rows, _ = load(saved).nearest(LARGE, make_batch(LARGE, 100), target, 10)
    assert len(rows) == 10


@pytest.mark.fault("B54")
@pytest.mark.parametrize("file", sorted(GOLDEN.glob("trees-*.ubj")), ids=lambda f: f.stem)
def test_trees_of_other_releases_are_read_and_answer_alike(file: Path) -> None:
    """Written by XGBoost 2.1 to 3.2; `tests/golden/trees.py` writes those of another."""
    trees = Trees(("column0", "column1", "column2"), file.read_bytes)
    rows = (np.arange(120, dtype=np.float32).reshape(40, 3) * 7919 % 101) / 101
    expected = json.loads(file.with_suffix(".json").read_text())
    assert trees.booster.inplace_predict(rows[:5]).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.fault("B53")
def test_a_pickle_that_the_card_vouches_for_is_refused_too(saved: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    part(saved, "model.ubj").write_bytes(pickle.dumps(Payload(proof)))
    raw = (part(saved, name).read_bytes() for name in ("model.ubj", "config.ubj"))
    edit_card(saved, hash=storage.content_hash(*raw))
    with pytest.raises(CorruptFile, match=r"model-.*\.ubj"):
        load(saved)
    assert not proof.exists()


@pytest.mark.fault("B03", "B54")
@pytest.mark.parametrize("name", ["card.json", "model.ubj", "config.ubj"])
@pytest.mark.parametrize("left", [None, 0.0, 0.5, 0.99])
def test_a_missing_or_truncated_file_is_named(saved: Path, name: str, left: float | None) -> None:
    file = part(saved, name)
    data = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(CorruptFile, match=str(saved) if left is not None else file.name):
        load(saved)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", '{"format": "1"}', "[" * 100_000, pickle.dumps(0, 0).decode()],
    ids=range(6),
)
def test_a_foreign_card_is_refused(saved: Path, text: str) -> None:
    (saved / "card.json").write_text(text)
    with pytest.raises(CorruptFile):
        load(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [("format", -1), ("ptx_schema", True), ("dtypes", "float16"), ("dtypes", 3), ("name", None),
     ("features", {}), ("features", "all"), ("training", []), ("target", {"device": {}}),
     ("params", {"rounds": "__import__('os')"}), ("canaries", [1.0]),
     ("canaries", {"model.ubj": "1"}), ("files", {}), ("files", ["model.ubj"]),
     ("files", {"model.ubj": "../model.ubj", "config.ubj": "config.ubj"}),
     ("files", {"model.ubj": "a", "config.ubj": "b", "more": "c"})],
)  # fmt: skip
def test_a_card_of_the_wrong_types_is_refused(saved: Path, name: str, value: Any) -> None:
    edit_card(saved, **{name: value})
    with pytest.raises(CorruptFile):
        load(saved)


def test_a_card_whose_device_has_no_multiprocessor_is_refused(saved: Path) -> None:
    target = json.loads((saved / "card.json").read_text())["target"]
    target["device"]["sm_count"] = 0
    edit_card(saved, target=target)
    with pytest.raises(CorruptFile, match="sm_count"):
        load(saved)


@pytest.mark.fault("B54")
def test_a_newer_format_is_refused(saved: Path) -> None:
    edit_card(saved, format=storage.FORMAT + 1)
    with pytest.raises(WrongVersion, match="upgrade"):
        load(saved)


# --- Feature schema ----------------------------------------------------------------------------


@pytest.mark.fault("B34")
@pytest.mark.parametrize(
    "change",
    [
        lambda names: [names[1], names[0], *names[2:]],
        lambda names: names[:-1],
        lambda names: [*names, "one_more"],
    ],
    ids=["swapped", "dropped", "added"],
)
@pytest.mark.parametrize("which", ["features", "config_features"])
def test_other_columns_are_refused(
    saved: Path, change: Callable[[list[str]], list[str]], which: str
) -> None:
    card = json.loads((saved / "card.json").read_text())
    edit_card(saved, **{which: change(card[which])})
    with pytest.raises(SchemaMismatch, match="difference is column"):
        load(saved)


@pytest.mark.fault("B34")
@pytest.mark.parametrize("schema", ["feature_schema", "ptx_schema"])
def test_a_model_of_another_schema_is_refused(saved: Path, schema: str) -> None:
    edit_card(saved, **{schema: 99})
    with pytest.raises(SchemaMismatch, match=schema):
        load(saved)


@pytest.mark.fault("B34")
def test_trees_of_swapped_columns_are_refused_though_the_card_lies(
    trained: XgbCostModel, table: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns are in the trees as well; a card that hides the difference does not help."""
    import xgboost

    names = [features.FEATURES[1], features.FEATURES[0], *features.FEATURES[2:]]
    data = xgboost.DMatrix(
        np.random.default_rng(0).random((50, len(names))), label=np.ones(50), feature_names=names
    )
    booster = xgboost.train({"nthread": 1}, data, num_boost_round=1)
    part(saved, "model.ubj").write_bytes(bytes(booster.save_raw(raw_format="ubj")))
    raw = (part(saved, name).read_bytes() for name in ("model.ubj", "config.ubj"))
    edit_card(saved, hash=storage.content_hash(*raw))
    with pytest.raises(SchemaMismatch, match="column 0"):
        load(saved)


# --- Which model answers -----------------------------------------------------------------------


def test_the_shipped_model_of_the_target_answers(
    trained: XgbCostModel, target: Target, shipped: Path
) -> None:
    trained.save(shipped / "h100-sxm")
    model, reason = find_model(target, LARGE)
    assert (model.hash, reason) == (trained.hash, "")
    assert list(shipped_models()) == ["h100-sxm"]


def test_the_model_in_use_comes_before_the_shipped_one(
    trained: XgbCostModel, target: Target, shipped: Path, saved: Path
) -> None:
    trained.save(shipped / "h100-sxm")
    edit_card(saved, name="mine")
    assert use(saved).name == "mine"
    assert find_model(target, LARGE)[0].name == "mine"
    use(None)
    assert find_model(target, LARGE)[0].name == trained.name


def test_a_bad_path_leaves_what_was_in_use(saved: Path, target: Target, tmp_path: Path) -> None:
    mine = use(saved)
    with pytest.raises(NoModel):
        use(tmp_path / "nowhere")
    assert find_model(target)[0] is mine


@pytest.mark.fault("B03")
@pytest.mark.parametrize("case", ["deleted", "dtype", "device", "schema"])
def test_without_a_model_the_rules_answer_and_one_warning_says_why(
    trained: XgbCostModel, target: Target, shipped: Path, case: str,
    make_batch: Callable[..., Candidates],
) -> None:  # fmt: skip
    workload, says = LARGE, "h100-sxm"
    if case != "deleted":
        path = trained.save(shipped / "h100-sxm")
    if case == "dtype":
        workload, says = Workload.dense(64, 64, 64, "bfloat16"), "bfloat16"
    elif case == "device":
        target, says = Target.named("b200-sxm", target.toolchain), "b200-sxm"
    elif case == "schema":
        edit_card(path, feature_schema=99)
        says = "feature_schema 99"
    with pytest.warns(RuntimeWarning, match=says) as seen:
        model, reason = find_model(target, workload)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_model(target, workload)  # it was said already
    assert isinstance(model, RuleHeuristic)
    assert says in reason
    assert np.isfinite(model.predict(workload, make_batch(LARGE, 5), target)).all()


@pytest.mark.fault("B03")
def test_a_model_in_use_that_cannot_answer_gives_way_to_the_shipped_one(
    trained: XgbCostModel, target: Target, shipped: Path
) -> None:
    b200 = Target.named("b200-sxm", target.toolchain)
    other = copy(trained)
    other.name = "other"
    other.card = replace(trained.card, target=b200, devices=("b200-sxm",))
    use(other)
    trained.save(shipped / "h100-sxm")
    with pytest.warns(RuntimeWarning, match="other was trained on b200-sxm"):
        model, reason = find_model(target, LARGE)
    assert model.name == trained.name
    assert "b200-sxm" in reason


@pytest.mark.fault("B46")
def test_another_triton_is_mentioned_but_answered(
    trained: XgbCostModel, target: Target, shipped: Path
) -> None:
    trained.save(shipped / "h100-sxm")
    newer = Target(target.device, Toolchain("3.7.1", "13.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, reason = find_model(newer, LARGE)
    assert model.name == trained.name
    assert "3.7.1" in reason


@pytest.mark.parametrize("name", ["card.json", "model.ubj", "torch.ubj"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop"])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, make_training_table: Any, make_workloads: Any, name: str, kind: str
) -> None:
    table = make_training_table(make_workloads(25, 2), rows=10)
    table = replace(table, torch_us=(9.0,) * 25)
    path = XgbCostModel(XgbParams(rounds=2, max_depth=2)).fit(table).save(tmp_path / "model")
    file = part(path, name)
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    with pytest.raises(FileError):
        load(path)


@pytest.mark.parametrize("path", [5, None, [], b"x", "a" * 5000, "a\0b"])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(CostModelError):
        load(path)


def test_nothing_there_and_a_file_are_told_apart(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NoModel, match="no model at"):
        load(tmp_path / "nowhere")
    with pytest.raises(CorruptFile, match="directory"):
        load(part(saved, "model.ubj"))
