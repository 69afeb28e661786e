"""Settings of Triton and ptxas that change code are a part of every key, and reach each child."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import triton
from dataset_examples import PROTOCOL
from dispatch_fakes import MODEL, Bench, compiled
from triton._C import libtriton

from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.data.dataset import Dataset
from costmodel.errors import MixedData
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, specialize, submit
from costmodel.gemm.workload import Workload
from costmodel.hardware.installed import compiler_settings
from costmodel.hardware.target import Target, Toolchain
from costmodel.processes import Done, SupervisedWorker
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

WORKLOAD = Workload.dense(640, 512, 256)
SPEC = specialize(WORKLOAD, GemmConfig("pointer", 64, 64, 32, num_warps=4, num_stages=2))

CHANGED = {
    "DISABLE_PTXAS_OPT": "1", "TRITON_DEFAULT_FP_FUSION": "0", "TRITON_F32_DEFAULT": "ieee",
    "TRITON_OVERRIDE_ARCH": "sm80", "TRITON_MOCK_PTX_VERSION": "8.0",
    "TRITON_PTXAS_PATH": "/elsewhere/ptxas", "TRITON_PTXAS_BLACKWELL_PATH": "/elsewhere/ptxas",
    "TRITON_LIBDEVICE_PATH": "/elsewhere/libdevice.bc", "TRITON_KERNEL_OVERRIDE": "1",
    "TRITON_ENABLE_ASAN": "1", "TRITON_DISABLE_LINE_INFO": "1",
    # Triton's own cache goes by these, of which it has no knobs.
    "DISABLE_LLVM_OPT": "1", "DISABLE_MMA_V3": "1", "LLVM_PASS_PLUGIN_PATH": "/elsewhere/pass.so",
}  # fmt: skip
READ_ONCE = {"PTXAS_OPTIONS": "--opt-level 1", "TRITON_INSTRUMENTATION_MODE": "consan"}
KNOBS = [
    (triton.knobs.nvidia, "disable_ptxas_opt", True),
    (triton.knobs.nvidia, "ptxas", "/elsewhere/ptxas"),
    (triton.knobs.language, "default_fp_fusion", False),
    (triton.knobs.compilation, "instrumentation_mode", "consan"),
]
HARMLESS = {
    "DISABLE_PTXAS_OPT": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PTXAS_OPTIONS": "",
    "DISABLE_LLVM_OPT": "0", "LLVM_ENABLE_TIMING": "0",
    "TRITON_ALWAYS_COMPILE": "1", "TRITON_KERNEL_DUMP": "1", "TRITON_DUMP_PTXAS_LOG": "1",
    "TRITON_CACHE_DIR": "/elsewhere", "TRITON_PRINT_AUTOTUNING": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting is changed before a test, nor by one after it."""
    for name in (*CHANGED, *READ_ONCE, *HARMLESS):
        if name != "TRITON_CACHE_DIR":
            monkeypatch.delenv(name, raising=False)
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.language.scope(), knobs.nvidia.scope():
        yield


def key_now() -> str:
    return artifact_key(SPEC, Target.named("h100-sxm"))


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.fault("N4")
def test_without_a_setting_keys_are_those_of_the_two_versions() -> None:
    version = Toolchain.current().ptxas
    assert version == triton.knobs.nvidia.ptxas.version
    named = Target.named("h100-sxm", Toolchain(triton.__version__, version))
    assert key_now() == artifact_key(SPEC, named)


@pytest.mark.fault("N4")
@pytest.mark.parametrize("name", CHANGED)
def test_each_setting_gives_binaries_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tools = key_now(), Toolchain.current()
    monkeypatch.setenv(name, CHANGED[name])
    assert key_now() != before
    assert f" {name}=" in Toolchain.current().ptxas
    monkeypatch.delenv(name)
    assert (key_now(), Toolchain.current()) == (before, tools)


@pytest.mark.fault("N4")
@pytest.mark.parametrize(("group", "name", "value"), KNOBS)
@pytest.mark.parametrize("in_environment", [True, False])
def test_a_setting_made_in_python_counts(
    group: object, name: str, value: object, in_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_now()
    monkeypatch.setattr(triton.knobs, "propagate_env", in_environment)
    setattr(group, name, value)
    assert key_now() != before


@pytest.mark.fault("N4")
@pytest.mark.parametrize("name", READ_ONCE)
def test_a_setting_that_triton_reads_once_counts_from_its_import_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, READ_ONCE[name])
    assert name not in Toolchain.current().ptxas
    tell = "from costmodel.hardware.target import Toolchain; print(Toolchain.current().ptxas)"
    found = subprocess.run([sys.executable, "-c", tell], stdout=subprocess.PIPE, text=True)
    assert f" {name}={READ_ONCE[name]}" in found.stdout


@pytest.mark.fault("N4")
def test_a_setting_that_only_a_later_triton_knows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_now()
    monkeypatch.setattr(libtriton, "get_cache_invalidating_env_vars", lambda: {"NEW_PASS": "true"})
    assert key_now() != before


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_code_changes_no_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_now()
    monkeypatch.setenv(name, HARMLESS[name])
    assert key_now() == before


# --- winners and datasets -------------------------------------------------------------------------


@pytest.mark.fault("N4")
@pytest.mark.parametrize("first", [{"DISABLE_PTXAS_OPT": "1"}, {}])
def test_a_winner_of_other_settings_is_not_taken(
    first: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and on disk: timed once with them and once without, in either order."""
    bench = Bench()

    def begin() -> Winners:
        return Winners(
            WinnerCache(tmp_path), target_of=lambda _: Target.named("h100-sxm"),
            process_of=lambda _: bench, compile_=compiled,
        )  # fmt: skip

    def timings(winners: Winners) -> int:
        before = bench.timings
        winners.find(winners.key(WORKLOAD, 0, model=MODEL), WORKLOAD.m)
        return bench.timings - before

    second = {} if first else {"DISABLE_PTXAS_OPT": "1"}
    one_process = begin()
    for settings in (first, second):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            assert timings(one_process) > 0
            assert timings(one_process) == 0
            assert timings(begin()) == 0, "it is on disk"
    assert len(one_process.cache.entries()) == 2


@pytest.mark.fault("N4")
def test_timings_under_a_setting_do_not_mix_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dataset.create(tmp_path / "plain", Target.named("h100-sxm"), PROTOCOL)
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    changed = Target.named("h100-sxm")
    with pytest.raises(MixedData, match=r"toolchain\.ptxas is .* DISABLE_PTXAS_OPT=1"):
        Dataset.create(tmp_path / "plain", changed, PROTOCOL)
    assert Dataset.create(tmp_path / "other", changed, PROTOCOL).target == changed


# --- children -------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This module, under a name that a child process can import."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("test_compiler_settings")


def settings_there(_: object) -> dict[str, str]:
    return {name: value for name, value in compiler_settings().items() if value is not None}


@pytest.mark.fault("N4")
@pytest.mark.parametrize("in_environment", [True, False])
def test_a_child_has_the_settings_that_its_parent_has_now(
    in_environment: bool, here: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs, "propagate_env", in_environment)
    monkeypatch.setenv("PTXAS_OPTIONS", "--opt-level 1")  # too late for this process
    with SupervisedWorker(here.settings_there, limit_s=60, settings=compiler_settings) as worker:
        assert worker.run(0) == Done({})
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.nvidia.disable_ptxas_opt = True
            triton.knobs.compilation.instrumentation_mode = "consan"
            there = {"DISABLE_PTXAS_OPT": "1", "TRITON_INSTRUMENTATION_MODE": "consan"}
            found = worker.run(0)
            assert isinstance(found, Done)
            assert there.items() <= found.value.items()
        assert worker.run(0) == Done({})


@pytest.mark.fault("N4")
def test_a_child_stays_while_settings_stay(here: ModuleType) -> None:
    with SupervisedWorker(here.process_of, limit_s=60, settings=compiler_settings) as worker:
        assert worker.run(0) == worker.run(1)


def process_of(_: object) -> int:
    return os.getpid()


@pytest.mark.fault("N4")
@pytest.mark.slow
def test_a_pool_compiles_under_the_settings_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unoptimized binary spills, or takes other registers."""

    def compile_by(pool: CompilePool) -> Artifact:
        return submit(pool, SPEC, Target.named("h100-sxm")).result()

    with CompilePool(1) as pool:
        optimized = compile_by(pool)
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
        plain = compile_by(pool)
    assert optimized.key != plain.key
    used = [(a.status, a.registers, a.spill_bytes) for a in (optimized, plain)]
    assert used[0] != used[1]
    assert [status for status, *_ in used] == ["ok", "ok"]
