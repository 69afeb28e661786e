"""Ranking: the model's order, without duplicates or failures, fast for each new shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodel.compile.compiler import Artifact, ArtifactStatus
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.errors import CorruptFile, InvalidInput, NoModel
from costmodel.evaluation.duplicates import identities, identity
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace, grid
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import RuleHeuristic, TrainingTable, XgbCostModel, XgbParams
from costmodel.models.confidence import Confidence, Coverage
from costmodel.tuning.ranking import rank

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
SHAPES = [(64, 4096, 1024), (2048, 2048, 2048), (333, 1024, 4096)]
EVEN, ODD = Workload.dense(512, 2048, 4096), Workload.dense(512, 2048, 8 * 125)
FAILS = "does not compile"


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up machine knows its own binaries only, not those of the shipped model."""
    monkeypatch.setattr("costmodel.models.registry.model_directory", lambda target: None)


def artifact(workload: Workload, config: GemmConfig) -> Artifact:
    """A made-up binary; those with 160 registers repeat those without.

    Those of 5 stages do not compile, those of 6 need more shared memory than there is.
    """
    spec = specialize(workload, config)
    key = artifact_key(spec, H100)
    if config.num_stages == 5:
        return Artifact(key, spec, "compile_error", FAILS)
    counts = dict.fromkeys(PTX_FEATURES, 1.0) | {"loop_mma_flops": 4096.0, "loop_wgmma": 2.0}
    same = artifact_key(specialize(workload, replace(config, maxnreg=0)), H100)
    shown = same if config.maxnreg == 160 else key
    registers = 40 + config.block_m * config.block_n // (32 * config.num_warps)
    shared_bytes = H100.device.shared_bytes + 1 if config.num_stages == 6 else 4096
    return Artifact(
        key, spec, registers=registers, shared_bytes=shared_bytes, ptx_hash=shown, ptx=counts
    )


def artifacts_of(workloads: Sequence[Workload]) -> ArtifactTable:
    made = {
        a.key: a
        for w in workloads
        for a in (artifact(w, c) for c in SearchSpace.of(w, H100).configs)
    }
    return ArtifactTable(ArtifactTable.rows(made.values()))


def latency_us(workload: Workload, config: GemmConfig) -> float:
    tiles = -(-workload.m // config.block_m) * -(-workload.n // config.block_n)
    rounds = -(-tiles // 132)
    return 5.0 + rounds * workload.k * (config.block_m + config.block_n) / 4e4


@pytest.fixture(scope="module")
def model() -> XgbCostModel:
    """Trained on a made-up machine; knows the artifacts of ``EVEN`` and of ``ODD``."""
    rng = np.random.default_rng(0)
    workloads = [Workload.dense(*s) for s in SHAPES]
    index, configs, made = [], [], []
    for w, workload in enumerate(workloads):
        space = SearchSpace.of(workload, H100).configs
        for i in rng.choice(len(space), 80, replace=False):
            index.append(w)
            configs.append(space[i])
            made.append(artifact(workload, space[i]))
    latency = [latency_us(workloads[w], c) for w, c in zip(index, configs, strict=True)]
    table = TrainingTable(
        workloads=tuple(workloads),
        workload_index=np.array(index, dtype=np.intp),
        latency_us=np.array(latency),
        status=np.full(len(configs), "ok", dtype=object),
        candidates=Candidates.of(configs, made),
        target=H100,
        artifacts=artifacts_of([EVEN, ODD]),
    )
    return XgbCostModel(XgbParams(rounds=20, max_depth=4), name="made-up").fit(table)


@pytest.mark.fault("B14")
@pytest.mark.parametrize("workload", [EVEN, ODD], ids=str)
def test_the_order_is_the_models_over_all_that_can_run(
    model: XgbCostModel, workload: Workload
) -> None:
    found = rank(workload, H100, model)
    legal = [c for c in SearchSpace.of(workload, H100).configs if c.num_stages not in (5, 6)]
    assert set(found.configs) <= set(legal)
    assert all(c.maxnreg != 160 or replace(c, maxnreg=0) not in found.configs
               for c in found.configs)  # fmt: skip
    assert (np.diff(found.cost) >= 0).all()
    again = Candidates.of(found.configs, [artifact(workload, c) for c in found.configs])
    np.testing.assert_allclose(model.predict(workload, again, H100), found.cost)
    assert found.considered == len(legal)
    assert found.failed == len(SearchSpace.of(workload, H100)) - len(legal)
    assert found.without_artifact == 0
    assert found.caveat == ""
    assert found.answered_by == (
        f"PTX head: artifacts of Triton 3.6.0, ptxas 12.8 for all {found.considered} configurations"
    )
    assert (found.model, found.model_hash) == ("made-up", model.hash)


@pytest.mark.fault("B12")
@pytest.mark.parametrize("status", ["crashed", "timeout"])
def test_a_compile_of_one_bad_moment_bars_nothing(
    model: XgbCostModel, monkeypatch: pytest.MonkeyPatch, status: ArtifactStatus
) -> None:
    """Its binary is one that nothing is known of: whoever tunes compiles it again."""
    whole = rank(EVEN, H100, model)
    first = whole.configs[0]
    assert model.artifacts is not None
    failed = Artifact(
        artifact_key(specialize(EVEN, first), H100), specialize(EVEN, first), status, "SIGKILL"
    )
    known = dict(model.artifacts) | {failed.key: failed}
    table = ArtifactTable(ArtifactTable.rows(known.values()))
    monkeypatch.setattr("costmodel.tuning.ranking.known_artifacts", lambda *_: table)
    found = rank(EVEN, H100, model)
    assert (found.failed, found.considered) == (whole.failed, whole.considered)
    assert found.without_artifact > 0
    assert not found.candidates.has_artifact[found.configs.index(first)]


def test_the_top_k_is_the_head_of_the_whole(model: XgbCostModel) -> None:
    whole = rank(EVEN, H100, model)
    for k in (1, 8, 100):
        assert rank(EVEN, H100, model, k).configs == whole.configs[:k]
    assert len(rank(EVEN, H100, model, 10**6)) == len(whole)


def test_of_many_that_do_the_same_none_crowds_out_the_others(model: XgbCostModel) -> None:
    whole = rank(EVEN, H100, model)
    # A tile order of more rows than there are is the same as one of all.
    same = [replace(whole.configs[0], group_m=g) for g in range(64, 364)]
    found = rank(EVEN, H100, model, 8, configs=[*same, *whole.configs[1:8]])
    assert len(found) == 8
    assert np.isfinite(found.cost).all()


def test_numbers_are_equal_where_identities_are() -> None:
    small = Workload.dense(20, 2048, 4096)  # of one or two tiles of rows: most orders are the same
    configs = [replace(c, group_m=g) for c in grid()[::40] for g in (1, 2, 8)]
    made = [artifact(small, c) if i % 4 else None for i, c in enumerate(configs)]
    candidates = Candidates.of(configs, made)
    numbers = identities(small, candidates)
    assert set(numbers.tolist()) <= set(range(len(configs)))
    named: dict[object, int] = {}
    for row, (config, found) in enumerate(zip(configs, made, strict=True)):
        same = identity(small, config, found)
        assert numbers[row] == named.setdefault(row if same is None else same, numbers[row])
    assert len(named) == len({*numbers.tolist()}) < len(configs)


@pytest.mark.fault("B03")
def test_it_says_when_artifacts_are_missing(model: XgbCostModel) -> None:
    unknown = Workload.dense(512, 2048, 4096, b_layout="col")
    found = rank(unknown, H100, model, 8)
    assert found.without_artifact == found.considered == len(SearchSpace.of(unknown, H100))
    assert found.answered_by.startswith("configuration-only head")
    assert len(found) == 8


@pytest.mark.fault("B48")
def test_a_new_shape_of_a_known_class_is_fast(model: XgbCostModel) -> None:
    rank(EVEN, H100, model, 8)
    times = []
    for m in range(100, 110):
        start = time.thread_time()
        rank(replace(EVEN, m=m), H100, model, 8)
        times.append(time.thread_time() - start)
    assert min(times) < 0.2, "20 to 40 ms; laying out a new class takes a second"


@pytest.mark.fault("B48")
def test_a_ranking_takes_one_core_though_nobody_has_said_so(
    model: XgbCostModel, tmp_path: Path
) -> None:
    """Processes that rank side by side, one for each GPU, do not wait for each other's threads."""
    model.save(tmp_path)
    code = (
        "import sys, time\n"
        "from costmodel import Target, Workload\n"
        "from costmodel.models import load\n"
        "from costmodel.tuning.ranking import rank\n"
        "model, target = load(sys.argv[1]), Target.named('h100-sxm')\n"
        "rank(Workload.dense(512, 2048, 4096), target, model)\n"
        "whole, own = time.process_time(), time.thread_time()\n"
        "for m in range(100, 130):\n"
        "    rank(Workload.dense(m, 2048, 4096), target, model)\n"
        "print((time.process_time() - whole) / (time.thread_time() - own))\n"
    )
    free = {name: x for name, x in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=free, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 1.2


def test_only_given_configurations(model: XgbCostModel) -> None:
    some = SearchSpace.of(EVEN, H100).configs[:40]
    found = rank(EVEN, H100, model, configs=some)
    assert set(found.configs) <= set(some)
    assert found.considered + found.failed == len(some)
    five = [c for c in SearchSpace.of(EVEN, H100).configs if c.num_stages == 5]
    with pytest.raises(InvalidInput, match="not to compile"):
        rank(EVEN, H100, model, configs=five)


def test_a_saved_model_answers_and_is_read_again_when_saved_again(
    model: XgbCostModel, tmp_path: Path
) -> None:
    path = model.save(tmp_path / "model")
    first = rank(EVEN, H100, path, 8)
    assert first.model_hash == model.hash
    assert first.configs == rank(EVEN, H100, model, 8).configs
    assert rank(EVEN, H100, str(path), 8).configs == first.configs
    time.sleep(0.02)  # the clock of a file system may be coarse
    XgbCostModel.load(path).save(path)
    card = json.loads((path / "card.json").read_text())
    (path / "card.json").write_text(json.dumps({**card, "name": "renamed"}))
    assert rank(EVEN, H100, path, 1).model == "renamed"


def test_a_path_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoModel):
        rank(EVEN, H100, tmp_path / "none")
    (tmp_path / "card.json").write_text("[]")
    with pytest.raises(CorruptFile):
        rank(EVEN, H100, tmp_path)


@pytest.mark.fault("B03")
@pytest.mark.parametrize("what", ["device", "bfloat16", "float32", "tf32"])
def test_a_model_that_knows_nothing_of_it_is_passed_over(
    model: XgbCostModel, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costmodel.models.registry.shipped_models", dict)
    monkeypatch.setattr("costmodel.validation._warned", set())
    target = Target.named("a100-sxm", H100.toolchain) if what == "device" else H100
    workload = EVEN if what == "device" else Workload.dense(512, 512, 2048, **kind_options(what))
    with pytest.warns(RuntimeWarning, match="rules of thumb"):
        found = rank(workload, target, model, 8)
    assert found.model == "heuristic"
    assert "made-up was trained on" in found.caveat
    assert what == "device" or f"not on {what}" in found.caveat
    assert found.configs[0] == rank(workload, target, RuleHeuristic(), 1).configs[0]
    assert found.predicted_us(0) is None


@pytest.mark.fault("B03")
@pytest.mark.parametrize("other", ["shipped", "in use"])
def test_what_answers_instead_of_a_named_model_is_a_warning(
    model: XgbCostModel, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.undo()  # the shipped model is there
    monkeypatch.setattr("costmodel.validation._warned", set())
    named = copy(model)
    named.card, named.name = replace(named.card, dtypes=("bfloat16",)), "named"
    if other == "in use":
        monkeypatch.setattr("costmodel.models.registry._used", [model])
    with pytest.warns(RuntimeWarning, match="named was trained on bfloat16") as told:
        found = rank(EVEN, H100, named, 8)
    assert len(told) == 1
    assert found.model != "named"
    assert f"{'the shipped model' if other == 'shipped' else 'model made-up'} answers" in str(
        told[0].message
    )
    assert "named was trained on bfloat16" in found.caveat


@pytest.mark.parametrize("by", ["object", "path", "use"])
@pytest.mark.parametrize(
    ("target", "says"),
    [(Target.named("h200-sxm", H100.toolchain), "trained on h100-sxm, this is h200-sxm"),
     (Target(H100.device, Toolchain("3.99.0", "12.8")), "trained with Triton 3.6.0"), (H100, "")],
    ids=["sibling", "toolchain", "its own"],
)  # fmt: skip
def test_however_a_model_is_named_its_reservation_is_told(
    model: XgbCostModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    target: Target, says: str, by: str,
) -> None:  # fmt: skip
    if by == "use":
        monkeypatch.setattr("costmodel.models.registry._used", [model])
    named = {"object": model, "path": model.save(tmp_path / "model"), "use": None}[by]
    found = rank(EVEN, target, named, 8)
    assert found.model == "made-up"
    assert says in found.caveat
    assert bool(says) == bool(found.caveat)


def test_a_float32_result_counts_as_the_type_that_is_multiplied(model: XgbCostModel) -> None:
    wide = Workload.dense(512, 512, 2048, out_dtype="float32")
    assert rank(wide, H100, model, 8).model == "made-up"


COVERED = Coverage.of([Workload.dense(1, 16, 16), Workload.dense(4096, 4096, 4096)])
KNOWN = Confidence({"1": 0.95, "8": 0.99}, {"1": 0.9, "8": 0.98}, COVERED)


@pytest.fixture
def calibrated(model: XgbCostModel, tmp_path: Path) -> XgbCostModel:
    copy = XgbCostModel.load(model.save(tmp_path / "copy"))
    copy.card = replace(copy.card, confidence=KNOWN)
    return copy


def test_how_sure_it_is_does_not_depend_on_how_many_are_asked_for(
    calibrated: XgbCostModel,
) -> None:
    whole = rank(EVEN, H100, calibrated)
    assert (whole.expected_kept(8), whole.out_of_coverage) == (0.99, "")
    for k in (1, 8, 40):
        found = rank(EVEN, H100, calibrated, k)
        assert found.configs == whole.configs[:k]
        assert found.kept == whole.kept


def test_without_artifacts_the_other_head_promises(calibrated: XgbCostModel) -> None:
    unknown = Workload.dense(512, 2048, 4096, b_layout="col")
    found = rank(unknown, H100, calibrated, 8)
    assert found.expected_kept(8) == 0.98
    assert "B col-major" in found.out_of_coverage


def test_what_lies_beyond_the_training_is_said(calibrated: XgbCostModel) -> None:
    inside, beyond = (rank(replace(EVEN, m=m), H100, calibrated, 8) for m in (4096, 40960))
    assert inside.out_of_coverage == ""
    assert beyond.out_of_coverage == "m = 40960 is beyond what the model has seen (1 to 4096)"
    data = beyond.to_dict()
    assert (data["sure"], data["doubt"]) == (False, beyond.out_of_coverage)
    assert data["expected_kept"]["8"] == beyond.expected_kept(8)


@pytest.mark.parametrize("which", ["uncalibrated", "rules"])
def test_what_cannot_tell_how_sure_it_is_says_nothing(model: XgbCostModel, which: str) -> None:
    found = rank(EVEN, H100, model if which == "uncalibrated" else RuleHeuristic(), 8)
    assert found.expected_kept(8) is None
    data = found.to_dict()
    assert (data["expected_kept"], data["sure"], data["doubt"]) == (None, None, "")
