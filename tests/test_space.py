"""The space: nothing illegal in it, nothing twice, a reason for whatever is left out."""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from code_classes import code_classes
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.gemm import space as space_module
from costmodel.gemm import specialize as specializing
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.dtypes import kinds
from costmodel.gemm.family import families, family, is_wide
from costmodel.gemm.space import (
    SearchSpace,
    grid,
    why_illegal,
)
from costmodel.gemm.specialize import compile_many, kernel_trouble, specialize
from costmodel.gemm.workload import MOST, CodeClass, Workload, kind_options
from costmodel.hardware.target import DEVICES, Target, Toolchain
from costmodel.launch.plan import Plan

TOOLS = Toolchain("3.6.0", "12.8")
TARGETS = {name: Target.named(name, TOOLS) for name in DEVICES}
H100 = TARGETS["h100-sxm"]
HOPPER = H100.device.architecture
LARGE = Workload.dense(4096, 4096, 4096)

targets = st.sampled_from(list(TARGETS.values()))
sizes = st.one_of(st.integers(1, 300), st.integers(1, 200_000), st.sampled_from([1, MOST]))
classes = code_classes()
# An output of over 2 TiB fits no GPU, and no grid of programs.
workloads = st.builds(Workload, sizes, sizes, sizes, classes).filter(lambda w: w.m * w.n <= 2**40)


def shared_bytes_at_least(config: GemmConfig, code: CodeClass) -> int:
    return int(family(config.kernel).shared_bytes_at_least(config, code, HOPPER))


def tile_order(config: GemmConfig, m: int, n: int) -> list[tuple[int, int]]:
    """(row, column) of the tiles in the order of the programs, as ``grouped_tile`` has it."""
    tiles_m, tiles_n = -(-m // config.block_m), -(-n // config.block_n)
    order = []
    for tile in range(tiles_m * tiles_n):
        group, inside = divmod(tile, config.group_m * tiles_n)
        rows = min(tiles_m - group * config.group_m, config.group_m)
        order.append((group * config.group_m + inside % rows, inside // rows))
    return order


def splits(config: GemmConfig, k: int) -> list[range]:
    """The steps of K that each split adds up."""
    steps = -(-k // config.block_k)
    share = -(-steps // config.split_k)
    return [range(s * share, min(steps, (s + 1) * share)) for s in range(config.split_k)]


# --- the whole grid is sorted --------------------------------------------------------------------


@pytest.mark.fault("B14")
@settings(deadline=None, max_examples=60)
@given(workloads, targets)
@pytest.mark.slow
def test_every_point_is_legal_or_has_a_reason(workload: Workload, target: Target) -> None:
    space = SearchSpace.of(workload, target)
    assert space.configs
    assert len(space) == len(space.configs)
    everything = [*space.configs, *space.rejected, *space.redundant]
    assert Counter(everything) == Counter(grid())
    for config in space.configs:
        assert not why_illegal(config, workload, target.device)
    for config, reason in space.rejected.items():
        assert reason == why_illegal(config, workload, target.device)
        assert re.match(
            r"(warp groups|registers|threads|TMA|shared memory|tensor memory|workspace|grid): ",
            reason,
        )
        assert re.search(r"\d", reason) or reason.endswith("no contiguous dimension")


@settings(deadline=None, max_examples=30)
@given(workloads, targets)
def test_no_two_configurations_do_the_same(workload: Workload, target: Target) -> None:
    space = SearchSpace.of(workload, target)
    launches = set()
    for c in space.configs:
        rows = -(-workload.m // c.block_m)
        spec = specialize(workload, c)
        launches.add((spec, c.split_k, min(c.group_m, rows), c.repack))
    assert len(launches) == len(space)


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 70, 100), (300, 500, 1000), (16, 4096, 256)])
def test_what_is_called_redundant_is(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    space = SearchSpace.of(Workload.dense(*shape), H100)
    assert all(all(splits(config, k)) for config in space.configs)
    names = {str(c): c for c in space.configs}
    kinds = set()
    for config, reason in space.redundant.items():
        if same := re.fullmatch("runs as (.*) does", reason):
            other = names[same[1]]
            assert specialize(space.workload, config) == specialize(space.workload, other)
            assert config.split_k == other.split_k
            assert tile_order(config, m, n) == tile_order(other, m, n)
            kinds.add("order")
        elif reason.startswith("repack"):
            assert not any(space.workload.code.needs_repack())
            kinds.add("repack")
        else:
            found = re.search(r"K has (\d+) steps of (\d+), (\d+) splits do the same", reason)
            assert found
            steps, block_k, busy = map(int, found.groups())
            assert (steps, block_k) == (-(-k // config.block_k), config.block_k)
            working = [s for s in splits(config, k) if s]
            assert len(working) == busy < config.split_k
            assert working == splits(replace(config, split_k=busy), k)
            kinds.add("splits")
    assert kinds >= {"order", "splits"}


# --- how large it is -----------------------------------------------------------------------------


def test_a_large_product_has_1500_configurations() -> None:
    """Counted in binaries with their launch parameters; few differ in a minor point alone."""
    configs = SearchSpace.of(LARGE, H100).configs
    distinct = {(specialize(LARGE, c), c.group_m, c.split_k) for c in configs}
    assert len(distinct) == len(configs) >= 1500
    major = {replace(c, maxnreg=0, group_m=1) for c in configs}
    assert len(configs) - len(major) <= len(configs) / 3
    assert {c.maxnreg for c in configs} >= {0, 80, 96, 128, 160}
    assert {c.kernel for c in configs} == set(families())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", kinds())
def test_every_target_has_a_space(name: str, dtype: str) -> None:
    space = SearchSpace.of(Workload.dense(4096, 4096, 4096, **kind_options(dtype)), TARGETS[name])
    kernels = {c.kernel for c in space.configs}
    assert len(space) >= 500
    assert ("tma" in kernels) == (space.target.device.arch >= 90)


def test_the_small_rule_has_its_points() -> None:
    """Tiles of 32 to 64, steps of 16 and 32, 1 to 4 warps, 1 or 2 stages; on ragged sizes too."""
    for shape in ((64, 64, 64), (333, 255, 17)):
        small = [
            c
            for c in SearchSpace.of(Workload.dense(*shape), H100).configs
            if c.num_stages <= 2 and c.block_k <= 32 and max(c.block_m, c.block_n) <= 64
        ]
        assert {c.num_warps for c in small} == {1, 2, 4}
        assert {c.block_k for c in small} == {16, 32}


def test_few_columns_over_a_long_sum_have_narrow_tiles_and_many_splits() -> None:
    for b_layout in ("row", "col"):
        configs = SearchSpace.of(Workload.dense(64, 16, 16384, b_layout=b_layout), H100).configs
        narrow = [c for c in configs if c.kernel == "tma" and c.block_n == 16]
        assert {c.block_k for c in narrow} == {128, 256}
        assert {c.split_k for c in narrow} == {1, 2, 4, 8, 16, 32}
        many = [c for c in configs if c.split_k == 32]
        assert {c.kernel for c in many} == {"pointer", "tma"}
        assert max(c.block_m * c.block_n for c in many) == 1024
    # Their partial sums of a large product would pass what a workspace may take.
    assert not any(c.split_k == 32 for c in SearchSpace.of(LARGE, H100).configs)


# --- why not -------------------------------------------------------------------------------------


GROUPS = GemmConfig("warp_specialized", 192, 96, 64, 12, 5)


@pytest.mark.fault("B14")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GemmConfig("pointer", 256, 256, 128, 8, 6), "shared memory: .* 786432 bytes.* 232448"),
        (GemmConfig("tma", 256, 256, 128, 8, 6), "shared memory: .* 786432 bytes.* 232448"),
        (GemmConfig("tma", 128, 256, 64, 16, 3, maxnreg=32), "registers: .* the limit is 32"),
        (GemmConfig("pointer", 128, 128, 64, 16, 3, maxnreg=32), "registers: .* the limit is 32"),
        (GemmConfig("tma", 128, 128, 64, 4, 3, maxnreg=80), "registers: .* the limit is 80"),
        (GemmConfig("tma", 128, 256, 64, 4, 3, maxnreg=128), "registers: .* 154.* is 128"),
        (GemmConfig("pointer", 64, 64, 64, 4, 3, maxnreg=7), "registers: maxnreg=7 "),
        (GemmConfig("pointer", 16, 16, 16, 1, 1, maxnreg=7), "registers: maxnreg=7 "),
        (GemmConfig("pointer", 16, 16, 16, 64, 2), "threads: 2048 pass the 1024"),
        (replace(GROUPS, num_warps=4), "warp groups: 4 warps multiply"),
        (replace(GROUPS, num_warps=16), "warp groups: 16 warps multiply"),
        (replace(GROUPS, num_warps=8), "warp groups: 192 rows cannot be dealt to 2"),
        (replace(GROUPS, block_m=128), "warp groups: 128 rows cannot be dealt to 3"),
        (replace(GROUPS, block_n=112), "warp groups: 112 columns are no one or two"),
        (replace(GROUPS, block_n=72), "warp groups: 72 columns are no one or two"),
        (replace(GROUPS, block_n=512), "warp groups: 512 columns are no one or two"),
        (replace(GROUPS, block_n=288), "registers: 170 a thread, 160 are there"),
        (replace(GROUPS, block_n=256), "registers: one wgmma of width 256 needs 154, .* is 128"),
        (replace(GROUPS, split_k=2), "warp groups: no split-K"),
        (replace(GROUPS, maxnreg=128), "warp groups: no split-K, maxnreg"),
        (replace(GROUPS, num_stages=7), "shared memory: the buffers take"),
        (GemmConfig("tma", 128, 256, 64, 4, 3), "$"),  # it spills, which is no reason
        (GROUPS, "$"),
    ],
    ids=str,
)
def test_why_a_configuration_cannot_run(config: GemmConfig, reason: str) -> None:
    assert re.match(reason, why_illegal(config, LARGE, H100.device))


def test_warp_groups_are_hoppers_and_store_by_tma() -> None:
    for name, target in TARGETS.items():
        legal = not why_illegal(GROUPS, LARGE, target.device)
        assert legal == (target.device.arch == 90), name
    for change in ({"a_align": 8}, {"c_align": 8}, {"c_layout": "col"}):
        workload = replace(LARGE, code=replace(LARGE.code, **change))
        assert why_illegal(GROUPS, workload, H100.device).startswith("TMA: ")


@pytest.mark.fault("B14")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_known_of_the_shared_memory_of_warp_groups_is_exact() -> None:
    """Every part of the sum, and no spill: of each tile of the grid, and of deep steps."""
    space = SearchSpace.of(LARGE, H100)
    groups = [c for c in space.configs if c.kernel == "warp_specialized"]
    configs = list({(c.block_m, c.block_n, c.halves): c for c in groups}.values())
    configs += [GemmConfig("warp_specialized", 192, 96, 128, 12, 2)]
    assert len(configs) > 20
    specs = {
        specialize(w, c): c
        for w in (LARGE, Workload.dense(64, 64, 64, "bfloat16", a_layout="col", b_layout="col"))
        for c in configs
    }
    for artifact in compile_many(specs, Target.named("h100-sxm"), n_jobs=2):
        assert (artifact.error, artifact.spill_bytes) == ("", 0)
        least = shared_bytes_at_least(specs[artifact.spec], artifact.spec.code)
        assert 0 <= artifact.shared_bytes - least <= 256


@pytest.mark.fault("B14")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_legal_for_float32_compiles_and_takes_the_memory_that_is_said() -> None:
    """Of each kernel and layout, in IEEE and in TF32; with 16-bit operands of a float32 C too."""
    configs = [
        GemmConfig("pointer", 64, 32, 16, 4, 3),
        GemmConfig("tma", 64, 64, 32, 4, 3),
        GemmConfig("tma", 16, 32, 64, 4, 4, split_k=2),
        GemmConfig("tma_persistent", 64, 64, 32, 4, 4, halves=True, flatten=True),
    ]
    by_spec: dict[Any, GemmConfig] = {}
    for layouts in ({}, {"a_layout": "col"}, {"b_layout": "col"}):
        for types in ({"dtype": "float32"}, {"dtype": "float32", "tf32": True},
                      {"out_dtype": "float32"}):  # fmt: skip
            workload = Workload.dense(1024, 1024, 1024, **types, **layouts)
            for config in configs:
                assert not why_illegal(config, workload, H100.device)
                by_spec[specialize(workload, config)] = config
    for artifact in compile_many(by_spec, Target.named("h100-sxm"), n_jobs=2):
        config, code = by_spec[artifact.spec], artifact.spec.code
        assert not artifact.error, (str(config), code.key())
        assert artifact.shared_bytes >= shared_bytes_at_least(config, code)
        wgmma = artifact.ptx["loop_wgmma"] > 0
        wide = is_wide(config.block_m, config.num_warps, code, HOPPER)
        assert wgmma == wide, (str(config), code.key())
        assert (artifact.ptx["all_mma_flops"] > 0) == (code.kind != "float32")


def test_warp_groups_multiply_16_bits_only_and_store_float32_too() -> None:
    wide = Workload.dense(4096, 4096, 4096, out_dtype="float32")
    assert not why_illegal(replace(GROUPS, num_stages=2), wide, H100.device)
    for tf32 in (False, True):
        workload = Workload.dense(4096, 4096, 4096, "float32", tf32=tf32)
        assert "float32 operands" in why_illegal(GROUPS, workload, H100.device)


def test_float32_takes_twice_the_memory() -> None:
    for tf32 in (False, True):
        workload = Workload.dense(4096, 4096, 4096, "float32", tf32=tf32)
        config = GemmConfig("tma", 128, 128, 64, 8, 3)
        stages = 3 if tf32 else 2  # FMA loads a stage to registers first, as mma.sync does
        assert shared_bytes_at_least(config, workload.code) == stages * 4 * 2 * 128 * 64
        assert not why_illegal(config, workload, H100.device)
        deep = replace(config, num_stages=6)
        assert why_illegal(deep, workload, H100.device).startswith("shared")


@pytest.mark.fault("B19")
@pytest.mark.parametrize(
    "change",
    [
        {"a_align": 8}, {"b_align": 2}, {"a_layout": "strided"}, {"b_layout": "strided"},
    ],
)  # fmt: skip
def test_tma_needs_alignment(change: dict[str, Any]) -> None:
    workload = replace(LARGE, code=replace(LARGE.code, **change))
    for config in (GemmConfig("tma", 64, 64, 64), GemmConfig("tma_persistent", 64, 64, 64)):
        assert not why_illegal(config, LARGE, H100.device)
        assert why_illegal(config, workload, H100.device).startswith("TMA: ")
    kernels = {c.kernel for c in SearchSpace.of(workload, H100).configs if not c.repack}
    assert "pointer" in kernels
    assert not any(family(name).reads_by_descriptor for name in kernels)


@pytest.mark.fault("B19")
def test_tma_may_write_c_of_any_kind() -> None:
    for change in ({"c_align": 2}, {"c_layout": "strided"}, {"c_layout": "col"}):
        workload = replace(LARGE, code=replace(LARGE.code, **change))
        assert "tma" in {c.kernel for c in SearchSpace.of(workload, H100).configs}


@pytest.mark.fault("B14")
def test_more_memory_than_a_block_has_is_refused_at_the_byte() -> None:
    config = GemmConfig("tma", 128, 256, 64, 8, 4)
    need = 4 * 2 * (128 * 64 + 256 * 64)
    for limit, legal in ((need, True), (need - 1, False)):
        device = replace(H100.device, shared_bytes=limit)
        assert (not why_illegal(config, LARGE, device)) == legal


@pytest.mark.fault("B14")
def test_too_many_programs() -> None:
    config = GemmConfig("pointer", 16, 16, 16)
    assert why_illegal(config, Workload.dense(2**20, 2**20, 1), H100.device).startswith("grid: ")


# --- launches ------------------------------------------------------------------------------------


@given(st.sampled_from(grid()), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 200))
def test_programs_and_workspace_cover_the_output(
    config: GemmConfig, m: int, n: int, sm_count: int
) -> None:
    tiles = len({(i // config.block_m, j // config.block_n)
                 for i in (*range(0, m, config.block_m), m - 1)
                 for j in (*range(0, n, config.block_n), n - 1)})  # fmt: skip
    plan = Plan(Workload.dense(m, n, 64), config, sm_count)
    blocks = plan.blocks
    if config.kernel in ("tma_persistent", "warp_specialized"):
        assert blocks == min(tiles, sm_count)
    else:
        assert blocks == tiles * config.split_k
    per_split_bytes = 4 * config.block_m * config.block_n
    splits_bytes = tiles * config.split_k * per_split_bytes if config.split_k > 1 else 0
    assert plan.workspace_bytes == splits_bytes


# --- the compiler agrees -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_distinct_binaries_are_distinct_programs() -> None:
    """Of close relatives, where a field of the configuration might make no difference."""
    rng = random.Random(0)
    configs = SearchSpace.of(LARGE, H100).configs
    sample: dict[GemmConfig, None] = {}
    for kernel in ("pointer", "tma", "tma_persistent"):
        first = rng.choice([c for c in configs if c.kernel == kernel and c.block_k == 64])
        same = ("kernel", "block_m", "block_n", "block_k")
        family = [c for c in configs if all(getattr(c, f) == getattr(first, f) for f in same)]
        sample |= dict.fromkeys(family)
    specs = dict.fromkeys(
        specialize(LARGE, c) for c in rng.sample(list(sample), min(24, len(sample)))
    )
    assert len(specs) >= 12
    artifacts = list(compile_many(specs, Target.named("h100-sxm"), n_jobs=2))
    assert [a.error for a in artifacts if not a.ok] == []
    programs = Counter((a.ptx_hash, a.shared_bytes) for a in artifacts)
    assert set(programs.values()) == {1}


@pytest.mark.fault("B14")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_compiler_refuses_what_is_rejected_and_takes_what_is_legal() -> None:
    """As far as can be told without a GPU: by ptxas, and by the size of shared memory."""
    target = Target.named("h100-sxm")
    space = SearchSpace.of(LARGE, target)
    rng = random.Random(1)
    rejected = [c for c, r in space.rejected.items() if r.startswith(("registers", "shared"))]
    near = sorted(rejected, key=lambda c: _bytes_of_stages(c))[:40]  # just over the limit
    chosen = dict.fromkeys((*rng.sample(near, 8), *rng.sample(rejected, 8)), False)
    chosen |= dict.fromkeys(rng.sample(space.configs, 16), True)
    by_spec = {specialize(LARGE, c): c for c in chosen}
    for artifact in compile_many(by_spec, target, n_jobs=2):
        config = by_spec[artifact.spec]
        runs = artifact.ok and artifact.shared_bytes <= target.device.shared_bytes
        assert runs == chosen[config], (str(config), space.rejected.get(config), artifact.error)


def _bytes_of_stages(c: GemmConfig) -> int:
    return c.num_stages * c.block_k * (c.block_m + c.block_n)


@pytest.mark.fault("B40")
def test_a_kernel_that_this_triton_cannot_have_is_rejected_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> Any:
        if name.endswith("warp_specialized"):
            raise ImportError("cannot import name 'warpgroup_mma'")
        return importlib.import_module(name)

    for function in (specializing.kernel_function, kernel_trouble):
        name, fresh = function.__name__, functools.cache(function.__wrapped__)
        monkeypatch.setattr(specializing, name, fresh)
        monkeypatch.setattr(space_module, name, fresh, raising=False)
    monkeypatch.setattr(specializing, "import_module", import_module)
    monkeypatch.setattr(space_module, "_possible", space_module._possible.__wrapped__)
    space = SearchSpace.of(LARGE, Target.named("h100-sxm"))
    assert {c.kernel for c in space.configs} == families().keys() - {"warp_specialized"}
    lacking = [r for c, r in space.rejected.items() if c.kernel == "warp_specialized"]
    assert lacking
    assert all("has no warp_specialized kernel (cannot import" in reason for reason in lacking)
    assert specializing.kernel_hash("warp_specialized"), "its text is there all the same"
    elsewhere = Target.named("h100-sxm", Toolchain("0.0", "0.0"))
    kernels = {c.kernel for c in SearchSpace.of(LARGE, elsewhere).configs}
    assert "warp_specialized" in kernels, "of another Triton nothing is known"
