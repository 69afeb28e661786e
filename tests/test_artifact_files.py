"""Tables of further toolchains: made without a GPU, found by name, merged, and never believed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.compile.artifact import Artifact
from costmodel.compile.ptx import PTX_FEATURES, PTX_SCHEMA
from costmodel.data import artifact_files
from costmodel.data.artifact_files import (
    class_specs,
    extend_table,
    read_tables,
    table_path,
    user_folder,
)
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.shards import Identity, write_shard
from costmodel.errors import FileError, InvalidInput
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import Specialization, artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import XgbCostModel, known_artifacts, load, model_directory
from costmodel.tuning.ranking import rank

OTHER = Target.named("h100-sxm", Toolchain("3.99.0", "99.1"))
EVEN, ODD = Workload.dense(512, 2048, 4096), Workload.dense(512, 2048, 8 * 125)

# By its name, the way a child process will find it.
here: Any = importlib.import_module("test_artifact_files")


def made_up(spec: Specialization, target: Target, dump: Path | None = None) -> Artifact:
    """In place of the compiler: refuses 5 stages, takes too long over 6, crashes at 4."""
    key, stages = artifact_key(spec, target), spec.config_binary[5]
    if stages == 5:
        return Artifact(key, spec, "compile_error", "no")
    if stages == 6:
        return Artifact(key, spec, "timeout", "too long")
    if stages == 4 and "crashing" in target.toolchain.ptxas:
        return Artifact(key, spec, "crashed", "killed by SIGKILL")
    counts = dict.fromkeys(PTX_FEATURES, 1.0)
    return Artifact(key, spec, registers=64, shared_bytes=4096, ptx_hash=key, ptx=counts)


def make(specs: list[Specialization], folder: Path, **options: Any) -> artifact_files.TableProgress:
    return extend_table(
        specs, OTHER, folder, n_jobs=1, progress=False, compile_function=here.made_up, **options
    )


def specs_of(workload: Workload, count: int | None = None) -> list[Specialization]:
    space = SearchSpace.of(workload, OTHER)
    return list(dict.fromkeys(specialize(workload, c) for c in space.configs))[:count]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(artifact_files.VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr("costmodel.models.registry._warned", set())
    return user_folder("h100-sxm")


@pytest.fixture(scope="module")
def model() -> XgbCostModel:
    shipped = model_directory(OTHER)
    assert shipped is not None
    return load(shipped)


@pytest.mark.parametrize("workload", [EVEN, ODD, Workload.dense(7, 4096, 64)], ids=str)
def test_a_class_has_the_binaries_of_all_its_products(workload: Workload) -> None:
    assert set(class_specs(workload.code, OTHER)) >= set(specs_of(workload))


@pytest.mark.fault("B31")
def test_a_table_goes_on_where_it_was(tmp_path: Path) -> None:
    specs = specs_of(EVEN, 40)
    slow = sum(spec.config_binary[5] == 6 for spec in specs)
    refused = sum(spec.config_binary[5] == 5 for spec in specs)
    first = make(specs, tmp_path, limit=10)
    assert (first.there, first.rows, first.left) == (0, first.compiled, 40 - first.compiled)
    second = make(specs, tmp_path)
    assert second.there == first.rows
    assert second.rows == first.rows + second.compiled == 40 - slow
    assert (first.refused + second.refused, second.left) == (refused, slow)
    assert second.path == table_path(tmp_path, OTHER.toolchain)
    table = ArtifactTable(read_tables([second.path], OTHER))
    assert set(table) == {artifact_key(s, OTHER) for s in specs if s.config_binary[5] != 6}


@pytest.mark.fault("B12")
def test_a_crash_is_not_kept_and_one_that_an_earlier_release_kept_is_tried_again(
    tmp_path: Path,
) -> None:
    specs = specs_of(EVEN, 40)
    crashing = Target(OTHER.device, Toolchain("3.99.0", "crashing"))
    crashes = sum(spec.config_binary[5] == 4 for spec in specs)
    slow = sum(spec.config_binary[5] == 6 for spec in specs)
    options = {"n_jobs": 1, "progress": False, "compile_function": here.made_up}
    made = extend_table(specs, crashing, tmp_path, **options)
    assert (made.rows, made.left) == (40 - slow - crashes, slow + crashes)
    assert crashes

    kept = [Artifact(artifact_key(s, OTHER), s, "crashed", "SIGKILL") for s in specs[:3]]
    path = table_path(tmp_path, OTHER.toolchain)
    header = {"ptx_schema": PTX_SCHEMA}
    write_shard(path, ArtifactTable.rows(kept), Identity(OTHER, {}), **header)
    again = make(specs[:3], tmp_path)
    assert (again.there, again.compiled) == (0, 3 - sum(s.config_binary[5] == 6 for s in specs[:3]))
    assert all(a.status != "crashed" for a in ArtifactTable(read_tables([path], OTHER)).values())


@pytest.mark.fault("B31")
@pytest.mark.parametrize("end", [OSError("no space"), KeyError("a bug"), KeyboardInterrupt()])
def test_however_it_ends_what_is_compiled_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    specs = [spec for spec in specs_of(EVEN, 40) if spec.config_binary[5] < 5]

    def compile_some(specs: list[Specialization], *_: Any, **__: Any) -> Iterator[Artifact]:
        yield from (made_up(spec, OTHER) for spec in specs[:7])
        raise end

    with monkeypatch.context() as patch:
        patch.setattr(artifact_files, "compile_many", compile_some)
        with pytest.raises(type(end)):
            make(specs, tmp_path)
    assert make(specs, tmp_path).there == 7


TOLD = """
import sys
from costmodel.data import artifact_files
from costmodel import cli

compile_many = artifact_files.compile_many
def compile_and_tell(*args, **options):
    for artifact in compile_many(*args, **options):
        print("one more", file=sys.stderr, flush=True)
        yield artifact

artifact_files.compile_many = compile_and_tell
cli.main()
"""


@pytest.mark.fault("B31")
@pytest.mark.compile
def test_a_program_that_is_told_to_end_keeps_what_it_has_compiled(tmp_path: Path) -> None:
    arguments = ["compile", "64", "64", "64", "--table", "--jobs", "1", "--target", "h100-sxm"]
    with subprocess.Popen(
        [sys.executable, "-c", TOLD, *arguments, "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(2)] == ["one more\n"] * 2
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    target = Target.named("h100-sxm")
    assert len(read_tables([table_path(tmp_path, target.toolchain)], target)) > 0


def test_what_another_table_has_is_not_made_again(tmp_path: Path) -> None:
    specs = specs_of(EVEN, 6)
    known = {artifact_key(specs[0], OTHER), artifact_key(specs[1], OTHER)}
    made = make(specs, tmp_path, known=known)
    assert (made.there, made.rows) == (2, 4)


@pytest.mark.fault("B46")
def test_ranking_finds_the_table_of_its_toolchain(model: XgbCostModel, own_folder: Path) -> None:
    before = rank(EVEN, OTHER, model, 4)
    assert before.head.startswith("configuration-only head")
    assert "--table" in before.head
    assert "3.99.0" in before.head
    specs = specs_of(EVEN)
    make(specs[:300], own_folder)
    some = rank(EVEN, OTHER, model, 4)
    assert 0 < some.without_artifact < some.considered
    assert some.head.startswith("PTX head for ")
    assert some.to_dict()["head"] == some.head


def test_tables_are_put_together(
    model: XgbCostModel, own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = specs_of(EVEN, 4)[:2], specs_of(EVEN, 4)[2:]
    make(first, own_folder)
    make(second, tmp_path / "beside")
    monkeypatch.setattr(
        "costmodel.models.known.model_directory", lambda target: tmp_path / "beside"
    )
    found = known_artifacts(model, OTHER)
    assert set(found) == {artifact_key(spec, OTHER) for spec in first + second}
    assert known_artifacts(model, OTHER) is found, "read once"
    assert isinstance(found, ArtifactTable)
    assert not np.isnan(found.columns(list(found))[:, 0]).all()


def test_a_models_own_artifacts_come_first(model: XgbCostModel, own_folder: Path) -> None:
    assert model.target_ is not None
    assert model.artifacts is not None
    assert known_artifacts(model, model.target_) is model.artifacts, "the shipped one, as it is"
    key = next(key for key in model.artifacts if model.artifacts[key].ok)
    spec = model.artifacts[key].spec
    extend_table(
        [spec], model.target_, own_folder, n_jobs=1, progress=False, compile_function=here.made_up
    )
    found = known_artifacts(model, model.target_)
    assert len(found) == len(model.artifacts)
    assert found[key].registers == model.artifacts[key].registers
    assert found[key].ptx_hash != key, "not the made-up one"


def of_ones_own(model: XgbCostModel) -> XgbCostModel:
    """As ``costmodel train`` makes one: it knows a few of the binaries, one by another count."""
    import pyarrow as pa

    assert model.artifacts is not None
    rows = model.artifacts.arrow().slice(0, 50)
    place = rows.column_names.index("registers")
    mine = copy(model)
    mine._artifacts = ArtifactTable(
        rows.set_column(place, rows.schema.field(place), pa.array([77] * 50, pa.int32()))
    )
    mine.name, mine._directory = "mine", None
    return mine


def test_a_model_of_ones_own_sees_what_the_shipped_one_was_trained_with(
    model: XgbCostModel,
) -> None:
    """Else what `compile --table` need not make, as the shipped model has it, is told lacking."""
    assert model.target_ is not None
    assert model.artifacts is not None
    mine = of_ones_own(model)
    found = known_artifacts(mine, model.target_)
    assert set(found) == set(model.artifacts)
    assert mine.artifacts is not None
    assert {found[key].registers for key in mine.artifacts} == {77}, "its own first"
    others = [key for key in model.artifacts if key not in mine.artifacts]
    assert all(found[key] == model.artifacts[key] for key in others[::100])
    assert known_artifacts(mine, model.target_) is found, "read once"
    assert rank(EVEN, model.target_, mine, 8).without_artifact == 0
    assert known_artifacts(mine, OTHER) == {}, "of another toolchain no binary is the same"


@pytest.mark.fault("B03")
@pytest.mark.parametrize(
    ("name", "found"), [("model_directory", None), ("shipped_model", (None, "cannot be used"))]
)
def test_no_shipped_model_is_no_trouble(
    model: XgbCostModel, monkeypatch: pytest.MonkeyPatch, name: str, found: Any
) -> None:
    assert model.target_ is not None
    mine = of_ones_own(model)
    monkeypatch.setattr(f"costmodel.models.known.{name}", lambda target: found)
    assert known_artifacts(mine, model.target_) is mine.artifacts


@pytest.mark.fault("B03")
@pytest.mark.parametrize("kind", ["garbage", "directory", "dangling", "loop", "device", "foreign"])
def test_a_file_that_is_no_table_is_one_warning(
    model: XgbCostModel, own_folder: Path, kind: str
) -> None:
    path = table_path(own_folder, OTHER.toolchain)
    own_folder.mkdir(parents=True)
    if kind == "garbage":
        path.write_bytes(b"PAR1 and no more")
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("/nowhere/at/all")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:  # sound, but of another toolchain than its name says
        other = Target(OTHER.device, Toolchain("3.98.0", "99.1"))
        made = extend_table(
            specs_of(EVEN, 1), other, own_folder,
            n_jobs=1, progress=False, compile_function=here.made_up,
        )  # fmt: skip
        made.path.rename(path)
    if kind == "dangling":
        assert known_artifacts(model, OTHER) == {}
        return
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert known_artifacts(model, OTHER) == {}
    assert known_artifacts(model, OTHER) == {}
    with pytest.raises(FileError):
        make(specs_of(EVEN, 1), own_folder)


@pytest.mark.fault("B53")
@pytest.mark.parametrize("version", ["../../etc", "/", "", "..", "3.6\0", "a" * 30])
def test_a_version_is_no_path(tmp_path: Path, version: str) -> None:
    assert table_path(tmp_path, Toolchain(version, version)).parent == tmp_path
    assert user_folder(version).parent.name == "artifacts"


def test_the_users_folder_has_an_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(artifact_files.VARIABLE, "relative")
    with pytest.raises(InvalidInput, match="relative"):
        user_folder("h100-sxm")
