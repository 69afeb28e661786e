"""A toy kernel from its registration to its launch; ``test_toy_family.py`` runs these.

The family is ``toy_family.py`` and the kernel ``toy_kernel.py``; no other file knows of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from dispatch_fakes import H100, FakeLaunch, Machine
from triton_interpreter import run_by_triton

import costmodel
from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import CONFIG_COLUMNS, Candidates
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.dispatch import loading
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.family import families
from costmodel.gemm.space import SearchSpace, why_illegal
from costmodel.gemm.specialize import (
    artifact_key,
    compile_many,
    kernel_hash,
    kernel_hashes,
    specialize,
)
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.replay import ReplayRunner
from costmodel.models import AnalyticModel, PtxScore
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuner import tune

# The interpreter of Triton 3.6.0 asks this of NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

WORKLOAD = Workload.dense(600, 700, 800)
RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.named("h100-sxm")


@pytest.fixture(scope="module")
def configs(target: Target) -> list[GemmConfig]:
    return [c for c in SearchSpace.of(WORKLOAD, target).configs if c.kernel == "toy"]


@pytest.fixture(scope="module")
def artifacts(configs: list[GemmConfig], target: Target) -> dict[GemmConfig, Artifact]:
    specs = {specialize(WORKLOAD, c): c for c in configs}
    return {specs[a.spec]: a for a in compile_many(specs, target, n_jobs=1)}


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory,
    artifacts: dict[GemmConfig, Artifact],
    target: Target,
) -> Dataset:
    data = Dataset.create(tmp_path_factory.mktemp("toy"), target, {"repeats": 5})
    data.append_artifacts(artifacts.values())
    records = [
        TuningRecord(WORKLOAD, config, a.key, Measurement("ok", us, us, us, 9, 1755))
        for us, (config, a) in enumerate(artifacts.items(), 50)
    ]
    torch_took = Measurement("ok", 99.0, 99.0, 99.0, 9, 1755)
    data.append_measurements(records, run=RUN, role="eval", torch={WORKLOAD: torch_took})
    return Dataset.open(data.path)


def test_it_is_registered_behind_the_others() -> None:
    assert list(families())[-1] == "toy"
    assert len(kernel_hash("toy")) == len(kernel_hash("tma"))
    assert kernel_hashes().keys() == families().keys()


def test_it_is_legal_with_reasons(configs: list[GemmConfig], target: Target) -> None:
    assert {(c.block_m, c.block_n) for c in configs} == {(32, 32), (64, 64)}
    assert parse_config(str(configs[0])) == configs[0]
    space = SearchSpace.of(WORKLOAD, target)
    reasons = {r for c, r in space.rejected.items() if c.kernel == "toy"}
    assert reasons == {"toy: a tile of 64x32 is no square"}
    for change, reason in (
        ({"num_warps": 64}, "threads: 2048"), ({"split_k": 2}, "toy: no split"),
        ({"block_m": 1024, "block_n": 1024, "num_stages": 4}, "shared memory: "),
    ):  # fmt: skip
        config = GemmConfig(**(configs[0].to_dict() | change))
        assert why_illegal(config, WORKLOAD, target.device).startswith(reason)


def test_it_is_compiled(artifacts: dict[GemmConfig, Artifact], target: Target) -> None:
    assert {a.status for a in artifacts.values()} == {"ok"}
    for config, artifact in artifacts.items():
        assert artifact.key == artifact_key(specialize(WORKLOAD, config), target)
        assert artifact.ptx["all_mma_sync"] + artifact.ptx["all_wgmma"] > 0


def test_it_is_ranked(artifacts: dict[GemmConfig, Artifact], target: Target) -> None:
    batch = Candidates.of(list(artifacts), list(artifacts.values()))
    assert batch.config_columns[:, CONFIG_COLUMNS.index("is_pointer")].all()
    for model in (AnalyticModel(), PtxScore.hopper()):
        cost = model.predict(WORKLOAD, batch, target)
        assert np.isfinite(cost).all()
        assert len(set(cost)) > 1
    ranking = rank(WORKLOAD, target, AnalyticModel())
    assert any(config.kernel == "toy" for config in ranking.configs)


def test_it_is_timed_by_a_replay(dataset: Dataset, artifacts: dict[GemmConfig, Artifact]) -> None:
    result = tune(WORKLOAD, runner=ReplayRunner(dataset), model=AnalyticModel(), k=4)
    assert result.config == next(iter(artifacts))
    assert len(result.measured) == len(artifacts)
    kept = dataset.artifacts()
    assert {kept[a.key].spec for a in artifacts.values()} == {a.spec for a in artifacts.values()}


class InterpretedLaunch(FakeLaunch):
    """What ``TritonLaunch`` is on a GPU; Triton's interpreter computes."""

    launched: ClassVar[list[GemmConfig]] = []

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.launched.append(self.config)
        run_by_triton(self.plan, self.plan.arguments(a, b, out, bias))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_matmul_dispatches_to_it(
    configs: list[GemmConfig], activation: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Machine(monkeypatch, tmp_path)
    monkeypatch.setattr(loading, "TritonLaunch", InterpretedLaunch)
    monkeypatch.setattr(Target, "current", classmethod(lambda cls, index=None: H100))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.delenv("TRITON_INTERPRET")  # Triton is imported; calls would be refused
    torch.manual_seed(0)
    a, b, bias = (torch.randn(size).half() for size in ((37, 50), (50, 70), (70,)))
    workload = Workload.from_tensors(
        a, b, torch.empty(37, 70).half(), bias=True, activation=activation or "none"
    )
    wanted = a.double() @ b.double() + bias.double()
    wanted = wanted.relu() if activation else wanted
    for config in configs:
        costmodel.pin(config, workload)
        out = costmodel.matmul(a, b, bias=bias, activation=activation)
        assert InterpretedLaunch.launched[-1] == config
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-3)
