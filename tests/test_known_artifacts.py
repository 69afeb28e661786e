"""Which compiled artifacts a model is shown without compiling: its own, and the shipped model's."""

from __future__ import annotations

import shutil
from copy import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import CONFIG_COLUMNS, Candidates
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import families
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import XgbCostModel, known_artifacts, load, model_directory
from costmodel.tuning.ranking import rank

OTHER = Target.named("h100-sxm", Toolchain("3.99.0", "99.1"))
EVEN = Workload.dense(512, 2048, 4096)


@pytest.fixture(scope="module")
def model() -> XgbCostModel:
    shipped = model_directory(OTHER)
    assert shipped is not None
    return load(shipped)


def of_ones_own(model: XgbCostModel) -> XgbCostModel:
    """As ``costmodel train`` makes one: it knows a few of the binaries, one by another count."""
    assert model.artifacts is not None
    rows = model.artifacts.arrow().slice(0, 50)
    place = rows.column_names.index("registers")
    mine = copy(model)
    mine.artifacts = ArtifactTable(
        rows.set_column(place, rows.schema.field(place), pa.array([77] * 50, pa.int32()))
    )
    mine.name, mine.directory = "mine", None
    return mine


@pytest.mark.fault("B46")
def test_with_another_triton_the_configuration_only_head_answers(model: XgbCostModel) -> None:
    assert not known_artifacts(model, OTHER)
    assert not known_artifacts(of_ones_own(model), OTHER)
    found = rank(EVEN, OTHER, model, 4)
    assert found.without_artifact == found.considered
    assert found.answered_by == (
        f"configuration-only head for all {found.considered} configurations: "
        f"no artifacts of Triton 3.99.0, ptxas 99.1"
    )
    assert "3.99.0" in found.caveat


def test_candidates_have_the_traits_of_their_kernels_and_no_others() -> None:
    kernels = {name: family.traits for name, family in families().items()}
    configs = [GemmConfig(name, 64, 64, 64) for name in kernels]
    columns = dict(zip(CONFIG_COLUMNS, Candidates.of(configs).config_columns.T, strict=True))
    for name, column in columns.items():
        if name.startswith("is_"):
            assert column.tolist() == [float(name in traits) for traits in kernels.values()]


def test_the_shipped_model_has_its_own(model: XgbCostModel) -> None:
    assert known_artifacts(model, model.card.target) is model.artifacts


def test_a_model_of_ones_own_sees_what_the_shipped_one_was_trained_with(
    model: XgbCostModel,
) -> None:
    assert model.artifacts is not None
    mine = of_ones_own(model)
    found = known_artifacts(mine, model.card.target)
    assert set(found) == set(model.artifacts)
    assert mine.artifacts is not None
    assert {found[key].registers for key in mine.artifacts} == {77}, "its own first"
    others = [key for key in model.artifacts if key not in mine.artifacts]
    assert all(found[key] == model.artifacts[key] for key in others[::100])
    assert known_artifacts(mine, model.card.target) is found, "merged once"
    assert rank(EVEN, model.card.target, mine, 8).without_artifact == 0


@pytest.mark.fault("B03")
@pytest.mark.parametrize(
    ("name", "found"), [("model_directory", None), ("shipped_model", (None, "cannot be used"))]
)
def test_no_shipped_model_is_no_trouble(
    model: XgbCostModel, monkeypatch: pytest.MonkeyPatch, name: str, found: Any
) -> None:
    mine = of_ones_own(model)
    monkeypatch.setattr(f"costmodel.models.registry.{name}", lambda target: found)
    assert known_artifacts(mine, model.card.target) is mine.artifacts


@pytest.mark.fault("B03")
@pytest.mark.parametrize("kind", ["garbage", "directory", "dangling", "loop", "device", "foreign"])
def test_a_file_that_is_no_table_is_one_warning(
    model: XgbCostModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert model.directory is not None
    monkeypatch.setattr("costmodel.validation._warned", set())
    folder = tmp_path / "model"
    shutil.copytree(model.directory, folder)
    path = folder / "artifacts.parquet"
    path.unlink()
    if kind == "garbage":
        path.write_bytes(b"PAR1 and no more")
    elif kind == "directory":
        path.mkdir()
    elif kind in ("dangling", "loop", "device"):
        path.symlink_to({"dangling": "nowhere", "loop": path.name, "device": "/dev/zero"}[kind])
    else:  # sound, but of another table
        shutil.copy(Path(__file__).parents[1] / "datasets/h200-sxm/artifacts.parquet", path)
    damaged = load(folder)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        found = known_artifacts(damaged, model.card.target)
    assert found, "what the shipped model was trained with"
    assert known_artifacts(damaged, model.card.target) is found
