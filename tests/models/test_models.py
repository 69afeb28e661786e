"""What every cost model must do, in one inherited class; and what each does besides."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.data.candidates import ARTIFACT_COLUMNS, Candidates
from costmodel.errors import NoModel
from costmodel.features.features import design_matrix
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.models import (
    AnalyticModel,
    PtxScore,
    RuleHeuristic,
    StaticRank,
    TrainingTable,
    XgbCostModel,
)
from costmodel.models.baselines import wanted
from costmodel.models.storage import read_card, read_trees

MakeBatch = Callable[..., Candidates]
LARGE = Workload.dense(4096, 4096, 4096)


class CostModelContract:
    """Inherit, and provide the fixture ``model``."""

    @pytest.fixture
    def model(self) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("artifacts", [True, False])
    def test_one_finite_cost_per_candidate(
        self, model: Any, target: Target, make_batch: MakeBatch, artifacts: bool
    ) -> None:
        batch = make_batch(LARGE, 37, artifacts=artifacts)
        cost = model.predict(LARGE, batch, target)
        assert cost.shape == (37,)
        assert cost.dtype == np.float64
        assert np.isfinite(cost).all()
        assert not model.predicts_latency or (cost > 0).all()

    def test_an_empty_batch_has_no_costs(self, model: Any, target: Target) -> None:
        assert model.predict(LARGE, Candidates.of([]), target).shape == (0,)

    @pytest.mark.fault("B34")
    def test_a_batch_may_mix_known_and_unknown_artifacts(
        self, model: Any, target: Target, make_batch: MakeBatch
    ) -> None:
        known = make_batch(LARGE, 10)
        mixed = Candidates.joined(
            [known.take(range(5)), known.take(range(5, 10)).without_artifacts()]
        )
        assert np.isfinite(model.predict(LARGE, mixed, target)).all()

    def test_neither_the_order_of_a_batch_nor_a_prediction_before_matters(
        self, model: Any, target: Target, make_batch: MakeBatch
    ) -> None:
        batch, order = make_batch(LARGE, 50), np.random.default_rng(3).permutation(50)
        before = batch.config_columns.copy(), batch.artifact_columns.copy()
        whole = model.predict(LARGE, batch, target)
        shuffled = model.predict(LARGE, batch.take(order), target)
        np.testing.assert_allclose(shuffled, whole[order], rtol=1e-6)
        np.testing.assert_array_equal(model.predict(LARGE, batch, target), whole)
        np.testing.assert_array_equal(before[0], batch.config_columns)
        np.testing.assert_array_equal(before[1], batch.artifact_columns)

    @pytest.mark.parametrize("size", [(0, 64, 64), (64, 64, 0), (1, 1, 1), (1, 131072, 16)])
    def test_extreme_sizes_are_ranked_too(
        self, model: Any, target: Target, make_batch: MakeBatch, size: tuple[int, int, int]
    ) -> None:
        cost = model.predict(Workload.dense(*size), make_batch(LARGE, 8), target)
        assert np.isfinite(cost).all()


class TestStaticRank(CostModelContract):
    @pytest.fixture
    def model(self, table: TrainingTable) -> StaticRank:
        return StaticRank().fit(table)

    def test_ranks_by_mean_speed(self, target: Target) -> None:
        fast, slow, unseen = (GemmConfig("pointer", 64, 64, k) for k in (32, 64, 128))
        table = TrainingTable(
            workloads=(LARGE, Workload.dense(64, 64, 64)),
            workload_index=np.array([0, 0, 1, 1]),
            latency_us=np.array([10.0, 20.0, 1.0, 5.0]),
            status=np.full(4, "ok", dtype=object),
            candidates=Candidates.of([fast, slow, fast, slow]),
            target=target,
        )
        batch = Candidates.of([unseen, slow, fast])
        cost = StaticRank().fit(table).predict(LARGE, batch, target)
        assert np.argsort(cost).tolist() == [2, 1, 0]

    def test_failures_do_not_count(self, target: Target) -> None:
        config = GemmConfig("pointer", 64, 64, 32)
        table = TrainingTable(
            workloads=(LARGE,),
            workload_index=np.array([0]),
            latency_us=np.array([np.nan]),
            status=np.array(["timeout"], dtype=object),
            candidates=Candidates.of([config]),
            target=target,
        )
        assert StaticRank().fit(table).speed == {}


class TestAnalyticModel(CostModelContract):
    @pytest.fixture
    def model(self) -> AnalyticModel:
        return AnalyticModel()

    def test_no_estimate_beats_the_roofline(self, target: Target) -> None:
        configs = SearchSpace.of(LARGE, target).configs
        cost = AnalyticModel().predict(LARGE, Candidates.of(configs), target)
        assert (cost >= target.device.roofline_us(LARGE.flops(), LARGE.bytes())).all()


def by_rules(workload: Workload, target: Target) -> list[GemmConfig]:
    """The legal configurations, nearest to the rules first."""
    configs = SearchSpace.of(workload, target).configs
    cost = RuleHeuristic().predict(workload, Candidates.of(configs), target)
    return [configs[row] for row in np.argsort(cost, kind="stable")]


class TestRuleHeuristic(CostModelContract):
    @pytest.fixture
    def model(self) -> RuleHeuristic:
        return RuleHeuristic()

    @pytest.mark.parametrize("side", [64, 100, 256, 512])
    def test_small_products_get_small_tiles(self, side: int, target: Target) -> None:
        workload = Workload.dense(side, side, side)
        best = by_rules(workload, target)[0]
        assert {best.block_m, best.block_n} <= {32, 64}
        assert best.block_k in {16, 32}
        assert best.num_warps <= 4
        assert best.num_stages <= 2

    @pytest.mark.parametrize("side", [4096, 8192])
    def test_large_products_get_large_tiles(self, side: int, target: Target) -> None:
        workload = Workload.dense(side, side, side)
        best = by_rules(workload, target)[0]
        assert {best.block_m, best.block_n} <= {128, 256}
        assert best.block_k in {32, 64}
        assert best.num_warps == 8
        assert best.num_stages in {4, 5}

    def test_a_tile_is_not_wider_than_the_product_needs(self, target: Target) -> None:
        workload = Workload.dense(16, 4096, 4096)
        best = by_rules(workload, target)[0]
        assert best.block_m == 16

    @pytest.mark.parametrize("side", [64, 256, 1000, 4096])
    def test_ieee_float32_gets_small_tiles(self, side: int, target: Target) -> None:
        """No tensor cores: the compiler writes every multiplication of a step down."""
        workload = Workload.dense(side, side, side, "float32")
        for best in by_rules(workload, target)[:8]:
            assert best.kernel == "pointer"
            assert max(best.block_m, best.block_n) <= 64
            assert best.block_k <= 64
            assert best.block_m * best.block_n * best.block_k <= 2048 * 32 * best.num_warps

    @pytest.mark.parametrize("side", [64, 256, 1000, 4096])
    def test_tf32_takes_half_the_step_of_16_bits(self, side: int, target: Target) -> None:
        half = wanted(Workload.dense(side, side, side), target)
        tf32 = wanted(Workload.dense(side, side, side, "float32", tf32=True), target)
        assert tf32 == half._replace(block_k=half.block_k // 2)
        wide = wanted(Workload.dense(side, side, side, out_dtype="float32"), target)
        assert wide == half

    def test_few_tiles_and_a_long_k_are_split(self, target: Target) -> None:
        workload = Workload.dense(128, 128, 16384)
        best = by_rules(workload, target)[0]
        assert best.split_k >= 8


class TestPtxScore(CostModelContract):
    @pytest.fixture(params=[PtxScore, PtxScore.hopper], ids=["literal", "hopper"])
    def model(self, request: pytest.FixtureRequest) -> PtxScore:
        return request.param()

    @staticmethod
    def counted(**counts: float) -> Candidates:
        """One candidate with these counts and zeros elsewhere."""
        batch = Candidates.of([GemmConfig("pointer", 64, 64, 32)])
        batch.artifact_columns[:] = 0
        for name, value in counts.items():
            batch.artifact_columns[:, ARTIFACT_COLUMNS.index(name)] = value
        return batch

    def test_weights_are_those_of_the_design(self, target: Target) -> None:
        batch = self.counted(
            score_mma_sync=3, score_cp_async=5, score_bar_sync=1, score_bra=2, score_ret=1,
            all_wgmma=100, all_mbarrier=7,
        )  # fmt: skip
        assert PtxScore().predict(LARGE, batch, target) == [-(30 + 10 - 30 - 10 - 5)]
        assert PtxScore.hopper().predict(LARGE, batch, target) == [5 - 1000 + 210]

    def test_unknown_artifacts_come_last(
        self, model: PtxScore, target: Target, make_batch: MakeBatch
    ) -> None:
        known = make_batch(LARGE, 6)
        mixed = Candidates.joined([known.take([0]).without_artifacts(), known.take(range(1, 6))])
        cost = model.predict(LARGE, mixed, target)
        assert cost[0] > cost[1:].max()


class TestNvMatmulHeuristics(CostModelContract):
    @pytest.fixture
    def model(self, script: Any) -> Any:
        pytest.importorskip("nvMatmulHeuristics", reason="optional: nvidia-matmul-heuristics")
        return script("peers").NvMatmulHeuristics()

    def test_its_first_proposal_comes_first(self, model: Any, target: Target) -> None:
        configs = SearchSpace.of(LARGE, target).configs
        first = configs[int(model.predict(LARGE, Candidates.of(configs), target).argmin())]
        proposed = model.propose(LARGE, target)[0]
        assert {n: getattr(first, n) for n in ("block_m", "block_n", "block_k")} == {
            n: proposed[n] for n in ("block_m", "block_n", "block_k")
        }


def test_a_missing_peer_names_the_command_that_installs_it(
    target: Target, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = script("peers")
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    peers._interface.cache_clear()
    with pytest.raises(NoModel, match=r"pip install 'triton-costmodel\[peers\]'"):
        peers.NvMatmulHeuristics().propose(LARGE, target)


class TestXgbCostModel(CostModelContract):
    @pytest.fixture
    def model(self, trained: XgbCostModel) -> XgbCostModel:
        return trained

    def test_an_unfitted_model_says_so(
        self, target: Target, make_batch: MakeBatch, tmp_path: Path
    ) -> None:
        model = XgbCostModel()
        assert model.hash == ""
        assert "not fitted" in model.why_not_usable(LARGE, target)
        with pytest.raises(NoModel, match="fit"):
            model.predict(LARGE, make_batch(LARGE, 3), target)
        with pytest.raises(NoModel, match="fit"):
            model.save(tmp_path / "m")

    def test_a_row_with_artifact_is_answered_alike_alone_and_in_a_mixed_batch(
        self, model: XgbCostModel, target: Target, make_batch: MakeBatch
    ) -> None:
        known, bare = make_batch(LARGE, 10), make_batch(LARGE, 10, artifacts=False)
        parts = [known.take([i]) if i % 2 else bare.take([i]) for i in range(10)]
        mixed = Candidates.joined(parts)
        full = model.predict(LARGE, known, target)
        config_only = model.predict(LARGE, bare, target)
        expected = np.where(np.arange(10) % 2, full, config_only)
        np.testing.assert_array_equal(model.predict(LARGE, mixed, target), expected)
        assert not np.array_equal(full, config_only)

    def test_answers_only_for_what_it_was_trained_on(
        self, model: XgbCostModel, target: Target
    ) -> None:
        assert model.why_not_usable(LARGE, target) == ""
        for kind in ("bfloat16", "float32", "tf32"):
            other = Workload.dense(64, 64, 64, **kind_options(kind))
            assert model.why_not_usable(other, target).endswith(f"not on {kind}")
        wide = Workload.dense(64, 64, 64, out_dtype="float32")
        assert model.why_not_usable(wide, target) == "", "what is multiplied is float16"
        elsewhere = Target.named("a100-sxm", target.toolchain)
        assert "a100-sxm" in model.why_not_usable(LARGE, elsewhere)

    def test_the_nearest_are_as_in_the_whole(
        self, trained: XgbCostModel, target: Target, make_batch: MakeBatch
    ) -> None:
        """Some with an artifact and some without: each head has rows among them."""
        known, unknown = make_batch(LARGE, 200), make_batch(LARGE, 200, seed=1, artifacts=False)
        both = Candidates.joined([known, unknown])
        latency_us = trained.predict(LARGE, both, target)
        for count in (1, 40, 399, 400, 1000):
            rows, nearest_us = trained.nearest(LARGE, both, target, count)
            assert len(rows) == min(count, 400)
            assert (np.diff(rows) > 0).all()
            np.testing.assert_array_equal(nearest_us, latency_us[rows])
        rows, _ = trained.nearest(LARGE, both, target, 40)
        assert set(np.argsort(latency_us)[:8]) <= set(rows)

    @pytest.mark.fault("B48")
    def test_a_prediction_takes_little_more_than_its_trees_with_one_thread(
        self, trained: XgbCostModel, target: Target, make_batch: MakeBatch, tmp_path: Path
    ) -> None:
        """Whatever the machine: half as long again was seen, the features being the rest."""
        batch = make_batch(LARGE, 500)
        matrix = design_matrix(LARGE, batch, target, ptx=True)
        trees = read_trees(trained.save(tmp_path), read_card(tmp_path))["model.ubj"].booster
        assert json.loads(trees.save_config())["learner"]["generic_param"]["nthread"] == "1"
        ways: tuple[Callable[[], object], ...] = (
            lambda: trees.inplace_predict(matrix),
            lambda: trained.predict(LARGE, batch, target),
        )
        seconds: list[list[float]] = []
        for _ in range(50):
            seconds.append([])
            for way in ways:
                start = time.thread_time()
                way()
                seconds[-1].append(time.thread_time() - start)
        bare, whole = np.median(seconds, axis=0)
        assert whole < 4 * bare + 5e-3
