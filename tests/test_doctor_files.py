"""``doctor`` names what is wrong with the files: kernels, models, tables and the cache."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cache import KEY, RESULT
from test_cli import run, run_json

import costmodel
from costmodel import validation
from costmodel.cli.doctor import Check, diagnose, usable
from costmodel.gemm import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import registry, shipped_models
from costmodel.tuning.ranking import rank
from costmodel.tuning.winner_cache import WinnerCache


def look_for(name: str) -> Check:
    """One check, as in a new process."""
    forget()
    (check,) = diagnose(only=name)
    return check


def look_at_model(path: Path) -> Check:
    """The check of a model that is named."""
    (check,) = diagnose(path, only=f"model {path}")
    return check


def forget() -> None:
    """What was read of kernels and models, as in a new process."""
    for found in (
        specialize.kernel_hashes, specialize._module, registry._load_shipped,
    ):  # fmt: skip
        found.cache_clear()
    validation._warned.clear()


@pytest.fixture
def afresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None) -> Path:
    """A copy of what is shipped, in its place."""
    (name, folder), *_ = shipped_models().items()
    copy = tmp_path / "models" / name
    shutil.copytree(folder, copy)
    monkeypatch.setattr(registry, "_root", lambda: copy.parent)
    return copy


def test_what_is_shipped_is_sound(model: Path) -> None:
    for check in (look_for("model"), look_at_model(model), look_for("artifacts")):
        assert check.ok, check


@pytest.mark.parametrize("name", ["tma", "pointer", "epilogue", "warp_specialized"])
def test_a_kernel_that_was_changed_has_no_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, name: str
) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(Path(costmodel.__file__).with_name("kernels"), folder)
    in_copy = lambda module: folder / f"{module.rpartition('.')[2]}.py"  # noqa: E731
    monkeypatch.setattr(specialize, "_file", in_copy)
    forget()
    file = folder / f"{name}.py"
    file.write_text(file.read_text() + "\n# a comment changes nothing\n")
    assert look_for("artifacts").ok
    forget()
    text = file.read_text()
    file.write_text(text.replace(" + ", " - "))
    assert file.read_text() != text
    check = look_for("artifacts")
    assert not check.ok
    assert "configuration-only head" in check.found
    assert "if kernels were changed: restore them" in check.advice
    forget()
    file.write_text("def broken(:")
    assert not look_for("artifacts").ok
    forget()
    file.unlink()
    assert not look_for("artifacts").ok


@pytest.mark.fault("B34")
@pytest.mark.parametrize(
    ("change", "text"),
    [({"feature_schema": 999}, "feature_schema 999"), ({"ptx_schema": 0}, "ptx_schema 0"),
     ({"features": ["one"]}, "feature columns"), ({"format": 99}, "format 99"),
     ({"hash": "0"}, "heads are not those"), ({"target": None}, "target")],
)  # fmt: skip
def test_a_model_of_another_schema_is_named(
    model: Path, change: dict[str, object], text: str
) -> None:
    card = json.loads((model / "card.json").read_text())
    (model / "card.json").write_text(json.dumps(card | change))
    for check in (look_for("model"), look_at_model(model)):
        assert not check.ok
        assert text in check.found
        assert "train" in check.advice


@pytest.mark.fault("B03")
def test_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    monkeypatch.setattr(registry, "_root", lambda: tmp_path / "nothing")
    check = look_for("model")
    assert (check.ok, check.found) == (False, "no model is shipped for h100-sxm (shipped: none)")
    assert not look_at_model(tmp_path / "nothing").ok


@pytest.mark.fault("B03")
def test_a_model_that_was_named_must_be_usable(model: Path) -> None:
    """Naming it is an error elsewhere, and no other answers in its place."""
    good = look_at_model(model)
    assert usable([good])
    (model / "card.json").write_text("{")
    for path in (model, model / "nothing", model / "card.json"):
        check = look_at_model(path)
        assert not usable([check])
        assert "train" in check.advice
        assert "answer" not in check.advice
        assert run("doctor", "--model", path).exit_code == 1


@pytest.mark.fault("B46")
def test_a_triton_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    other = Toolchain("3.99.0", "13.9")
    monkeypatch.setattr(Toolchain, "current", classmethod(lambda cls, arch=90: other))
    check = look_for("artifacts")
    assert not check.ok
    assert "no artifacts of Triton 3.99.0, ptxas 13.9" in check.found
    assert "those without are ranked by the configurations alone" in check.advice
    assert "if kernels are new: collect and train" in check.advice


def test_artifacts_that_cannot_be_read_are_named_and_are_no_warning(model: Path) -> None:
    assert look_for("artifacts").ok
    (model / "artifacts.parquet").write_bytes(b"PAR1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = look_for("artifacts")
    assert not check.ok
    assert "artifacts.parquet" in check.advice


@pytest.mark.fault("B13")
def test_files_in_the_cache_that_are_no_winners_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    WinnerCache().put(KEY, RESULT)
    assert "1 winners" in look_for("cache").found
    (tmp_path / "x.json").write_text("{")
    check = look_for("cache")
    assert not check.ok
    assert check.found.startswith("1 of 2 files")
    cleared = run_json("cache", "clear", "--yes")
    assert (cleared["removed"], cleared["unusable"]) == (1, 1)
    assert look_for("cache").ok


@pytest.mark.fault("N9")
@pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning")
@pytest.mark.parametrize("device", ["h100-sxm", "h200-sxm", "a100-sxm"])
def test_doctor_says_of_a_gpu_what_the_tuner_does(
    monkeypatch: pytest.MonkeyPatch, afresh: None, device: str
) -> None:
    """An H200 has no model of its own: the H100's answers, and doctor must not say otherwise."""
    target = Target.named(device)
    monkeypatch.setattr(Target, "current", classmethod(lambda cls: target))
    ranking = rank(Workload.dense(4096, 4096, 4096), target)
    model, artifacts = look_for("model"), look_for("artifacts")
    assert model.ok == artifacts.ok == bool(ranking.answered_by)
    assert ranking.caveat in model.found
    if model.ok:
        assert f"{ranking.model} ({ranking.model_hash})" in model.found
        assert artifacts.found == ranking.answered_by
    else:
        assert "rules of thumb answer" in model.advice
