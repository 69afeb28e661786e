"""Tuning a user's kernel survives its configurations, its processes and its files."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import autotune_fakes
import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import (
    Launch,
    Machine,
    add,
    compiling,
    configs,
    machine_without_gpu,
)
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import costmodel
from costmodel.autotune.store import KernelEntry, KernelStore
from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Measurement
from costmodel.errors import CompileError, CostModelError, HostError
from costmodel.hardware.target import Target

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
BLOCKS = (64, 32, 128)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with machine_without_gpu(tmp_path / "kernels") as machine:
        yield machine
        monkeypatch.undo()  # what a test has put over the stand-ins goes before them


def tuned(*blocks: int, function: Any = add, own: Any = None, **options: Any) -> Any:
    own = own or configs(*(blocks or BLOCKS))
    kernel = costmodel.autotune(own, ["n"], **options)(triton.jit(function))
    x = torch.zeros(64)
    kernel[(1,)](x, None, x, 64)
    return kernel


def entry(machine: Machine) -> KernelEntry:
    (found,) = KernelStore(machine.folder).entries()
    return found


def kept(machine: Machine) -> dict[int, Measurement]:
    """By block size: what is on disk."""
    measured = entry(machine).measured
    return {json.loads(name)["kwargs"]["BLOCK"]: m for name, m in measured.items()}


def by_warps(*warps: int) -> list[triton.Config]:
    return [c for number in warps for c in configs(32, num_warps=number)]


def statuses(machine: Machine) -> dict[int, Measurement]:
    """By number of warps: what is on disk."""
    measured = entry(machine).measured
    return {json.loads(name)["num_warps"]: m for name, m in measured.items()}


# --- What is known is not done again --------------------------------------------------------------


def test_the_next_process_neither_compiles_nor_times(machine: Machine) -> None:
    tuned()
    assert set(kept(machine)) == set(BLOCKS)
    machine.restart()
    kernel = tuned()
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert len(machine.launches) == 1
    assert not machine.jobs


def test_an_added_configuration_is_all_that_is_compiled(machine: Machine) -> None:
    tuned(64, 32)
    machine.restart()
    kernel = tuned(64, 16, 32)
    assert len(machine.jobs) == 1
    assert kernel.best_config.kwargs == {"BLOCK": 16}
    machine.restart()
    tuned(16, 32, 64)
    assert len(machine.launches) == 1


def test_a_configuration_that_is_taken_away_is_not_launched(machine: Machine) -> None:
    tuned(64, 32, 128)
    machine.restart()
    kernel = tuned(64, 128)
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert not machine.jobs
    assert machine.timed() <= {64, 128}
    machine.restart()
    tuned(64, 32, 128)
    assert not machine.jobs


def test_configurations_with_one_binary_are_timed_once_and_known(machine: Machine) -> None:
    machine.outcome = lambda job, artifact: replace(artifact, ptx_hash="same")
    own = [c for stages in (1, 2, 3, 4) for c in configs(32, num_stages=stages)]
    tuned(own=own)
    assert len({launch.options["num_stages"] for launch in machine.launches}) == 1
    machine.restart()
    tuned(own=own)
    assert len(machine.launches) == 1
    assert not machine.jobs


MODULE = """
import triton, triton.language as tl

SCALE = tl.constexpr({scale})

@triton.jit
def helper(x):
    return x * {factor}

@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, helper(tl.load(x_ptr + at, mask=at < n)) * SCALE, mask={mask})
"""


def module(folder: Path, **parts: str) -> Any:
    """The function of a kernel whose source was edited."""
    path = folder / "edited.py"
    path.write_text(MODULE.format(**{"scale": "1", "factor": "2", "mask": "at < n"} | parts))
    spec = importlib.util.spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    import linecache

    linecache.checkcache(str(path))
    spec.loader.exec_module(made)
    sys.dont_write_bytecode = before
    return made.kernel.fn


@pytest.mark.fault("B16")
@pytest.mark.parametrize(
    ("part", "new"), [("scale", "3"), ("factor", "5"), ("mask", "at < n - 1"), ("", "")]
)
def test_another_kernel_is_another_key(
    machine: Machine, tmp_path: Path, part: str, new: str
) -> None:
    tuned(function=module(tmp_path))
    machine.restart()
    tuned(function=module(tmp_path, **({part: new} if part else {})))
    assert len(machine.jobs) == (3 if part else 0)


def at_least(least: int) -> Any:
    return lambda named: named["n"] >= least


HEURISTICS = [
    (lambda named: named["n"] % 16 == 0, 0),
    (lambda named: named["n"] % 32 == 0, 3),
    (functools.partial(lambda least, named: named["n"] >= least, 64), 3),
    (at_least(16), 3),
    (at_least(32), 3),
]


@pytest.mark.fault("B16")
def test_other_heuristics_are_another_key(machine: Machine) -> None:
    def kernel(x_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + tl.arange(0, BLOCK), n, mask=tl.arange(0, BLOCK) < n)

    def call(heuristic: Any) -> None:
        machine.restart()
        jit = triton.heuristics({"EVEN": heuristic})(triton.jit(kernel))
        costmodel.autotune(configs(*BLOCKS), ["n"])(jit)[(1,)](torch.zeros(96), 96)

    call(lambda named: named["n"] % 16 == 0)
    for heuristic, compiled in HEURISTICS:
        call(heuristic)
        assert len(machine.jobs) == compiled


@pytest.mark.fault("B16", "N4", "B46")
def test_another_machine_or_compiler_is_another_key(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned()
    first = machine.target
    toolchain = first.toolchain
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    without = Target.named("h100-sxm")
    monkeypatch.delenv("DISABLE_PTXAS_OPT")
    others = [
        without,
        Target.named("h200-sxm", toolchain),
        replace(first, device=replace(first.device, sm_count=60)),
        replace(first, toolchain=replace(toolchain, triton="9.9.9")),
        replace(first, toolchain=replace(toolchain, ptxas="13.0")),
    ]
    for other in others:
        machine.restart()
        machine.target = other
        tuned()
        assert len(machine.jobs) == 3, other
    machine.target = first
    machine.restart()
    tuned()
    assert not machine.jobs


def test_the_content_of_written_code_is_in_the_identity(machine: Machine, tmp_path: Path) -> None:
    code = tmp_path / "own.ttir"
    code.write_text("module {}")
    own = [*configs(64, 32), *configs(32, ir_override=str(code))]
    tuned(own=own)
    assert len(machine.jobs) == 3
    machine.restart()
    tuned(own=own)
    assert not machine.jobs
    code.write_text("module { }")
    machine.restart()
    tuned(own=own)
    assert len(machine.jobs) == 1
    code.unlink()
    machine.restart()
    kernel = tuned(own=own)
    assert kernel.best_config.ir_override is None


# --- Configurations that fail ---------------------------------------------------------------------


@pytest.mark.fault("B12", "B14", "B27")
@pytest.mark.parametrize("status", ["crashed", "compile_error", "timeout"])
def test_a_failed_compile_costs_that_configuration_only(machine: Machine, status: str) -> None:
    def outcome(job: Any, artifact: Artifact) -> Artifact:
        failed: Any = {"status": status, "error": "no"} if job.options["num_warps"] == 8 else {}
        return replace(artifact, **failed)

    machine.outcome = outcome
    kernel = tuned(own=by_warps(8, 2, 4))
    assert kernel.best_config.num_warps != 8
    assert {launch.options["num_warps"] for launch in machine.launches} == {2, 4}
    assert statuses(machine)[8].status == status
    assert statuses(machine)[8].error == "no"
    assert kernel.configs_timings[kernel.configs[0]] == [float("inf")] * 3
    machine.restart()
    tuned(own=by_warps(8, 2, 4))
    assert not machine.jobs


@pytest.mark.fault("B14")
@pytest.mark.parametrize(
    "error", [OutOfResources(300000, 232448, "shared memory"), torch.OutOfMemoryError("full")]
)
def test_a_refused_launch_costs_that_configuration_only(machine: Machine, error: Any) -> None:
    seen: list[Any] = []

    def refuse(launch: Launch) -> None:
        if launch.block == 32:
            raise error

    machine.effect = refuse
    kernel = tuned(post_hook=lambda named, exception: seen.append(exception))
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert kept(machine)[32].status == "out_of_resources"
    assert error in seen
    assert None in seen


@pytest.mark.fault("B14")
def test_options_that_the_backend_refuses_cost_their_configuration(machine: Machine) -> None:
    kernel = tuned(own=[*configs(32, num_warps=3), *configs(64)])
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert kept(machine)[32].status == "compile_error"


@pytest.mark.fault("B14")
def test_a_kernel_that_does_not_parse_with_a_constant(machine: Machine) -> None:
    kernel = tuned(48, 64)  # arange wants a power of two
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert "power of 2" in kept(machine)[48].error


@pytest.mark.fault("B14")
def test_if_nothing_works_one_error_names_the_reasons(machine: Machine) -> None:
    machine.outcome = lambda job, artifact: replace(
        artifact, status="compile_error", error=f"refused {job.options['num_warps']}"
    )
    for _ in range(2):  # what is known to fail is told too
        with pytest.raises(CompileError, match=r"add: none of 3 config.*refused 1.*refused 2"):
            tuned(own=by_warps(1, 2, 4))
        machine.restart()


def broken(launch: Launch) -> None:
    if launch.block == 128:
        said = "CUDA error: an illegal memory access was encountered"
        raise torch.AcceleratorError(f"{said}\nSearch for it in the documentation.")


@pytest.mark.fault("B04")
def test_a_configuration_that_breaks_the_context_is_left_out_next_time(machine: Machine) -> None:
    machine.effect = broken
    said = r"BLOCK: 128.* broke the CUDA context: CUDA error: .*the next run leaves that .* out$"
    with pytest.raises(CostModelError, match=said):
        tuned()
    assert kept(machine)[128].status == "crashed"
    machine.restart()
    kernel = tuned()
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert 128 not in machine.timed()


@pytest.mark.fault("B14")
def test_a_launch_that_the_driver_refuses_costs_that_configuration_only(machine: Machine) -> None:
    def refuse(launch: Launch) -> None:
        if launch.block == 32:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    machine.effect = refuse
    assert tuned().best_config.kwargs == {"BLOCK": 64}
    assert kept(machine)[32].status == "launch_error"


@pytest.mark.fault("B04")
def test_the_launch_after_the_one_that_broke_the_context_is_told_in_tritons_words(
    machine: Machine,
) -> None:
    def later(launch: Launch) -> None:
        if launch.block == 128:
            machine.broken = torch.AcceleratorError("CUDA error: an illegal memory access")
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    machine.effect = later
    with pytest.raises(CostModelError, match=r"BLOCK: 128.* broke the CUDA context"):
        tuned(64, 128)
    assert kept(machine)[128].status == "crashed"


@pytest.mark.fault("N6")
def test_a_device_that_rested_is_warmed_before_it_times(machine: Machine) -> None:
    """Else what happens to be timed first looks slow, and is no finalist."""
    cold: list[int] = []
    machine.effect = lambda launch: None if machine.warm else cold.append(launch.block)
    tuned()
    assert not cold


@pytest.mark.fault("B61")
def test_slow_finalists_are_compared_in_a_few_turns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune_fakes.runner, "_COMPARED_S", 0.0)
    tuned(32, 64)
    assert len(machine.launches) < 2 * (12 + 1 + 3 * 2) + 2


@pytest.mark.fault("N6")
def test_a_launch_that_the_host_was_late_with_makes_the_next_ones_wait(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []  # in cycles, 2,000 to a microsecond
    monkeypatch.setattr(autotune_fakes.runner.torch.cuda, "_sleep", waits.append)
    monkeypatch.setattr(autotune_fakes.runner, "perf_counter", lambda: machine.now_us / 1e6)
    late_at: list[int] = []

    def late(launch: Launch) -> None:
        if len(waits) == 20 and not late_at:
            late_at.append(len(waits))
            machine.now_us += 100_000

    machine.effect = late
    tuned(32, 64)
    assert waits[20] == max(waits) > 2000 * 100_000
    assert waits[28] < waits[20] / 50


@pytest.mark.fault("B04")
def test_the_blame_is_right_if_it_breaks_later(machine: Machine) -> None:
    def later(launch: Launch) -> None:
        if [x.block for x in machine.launches].count(32) == 20 and launch.block == 32:
            broken(replace(launch, named={"BLOCK": 128}))

    machine.effect = later  # while finalists are compared
    with pytest.raises(CostModelError, match=r"BLOCK: 32.* broke the CUDA context"):
        tuned()
    assert {block: m.status for block, m in kept(machine).items()} == {
        32: "crashed", 64: "ok", 128: "ok",
    }  # fmt: skip
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 64}
    assert 32 not in machine.timed()


@pytest.mark.fault("B04")
def test_an_error_of_a_hook_is_the_programs_own(machine: Machine) -> None:
    def hook(named: dict[str, Any]) -> None:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        tuned(own=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS])


@pytest.mark.fault("B09")
def test_written_code_that_computes_something_else_cannot_win(
    machine: Machine, tmp_path: Path
) -> None:
    code = tmp_path / "own.ttir"
    code.write_text("module {}")

    def write(launch: Launch) -> None:
        launch.named["out_ptr"][:] = 2.0 if launch.options.get("ir_override") else 1.0

    machine.effect = write
    machine.us = lambda launch: 1.0 if launch.options.get("ir_override") else 5.0
    own = [*configs(32, ir_override=str(code)), *configs(64)]
    assert tuned(own=own).best_config.ir_override is None


@pytest.mark.fault("B09")
def test_other_results_than_those_of_the_others_cannot_win(machine: Machine) -> None:
    def write(launch: Launch) -> None:
        half = launch.block == 16
        launch.named["out_ptr"][: 32 if half else 64] = 1.0

    machine.effect = write
    assert tuned(16, 32, 64, 128).best_config.kwargs == {"BLOCK": 16}
    for path in machine.folder.iterdir():
        path.unlink()
    machine.restart()
    kernel = tuned(16, 32, 64, 128, check="agree")
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert kept(machine)[16].status == "wrong_result"
    assert "out_ptr" in kept(machine)[16].error
    machine.restart()
    assert tuned(16, 32, 64, 128, check="agree").best_config.kwargs == {"BLOCK": 32}
    assert len(machine.launches) == 1


def scattering() -> Callable[[Launch], float]:
    """Let the launches of each block size take 10 and 100 us in turn, however many there are.

    How many are made depends on the real clock, so numbers drawn at random may agree by chance.
    """
    times: dict[int, Iterator[float]] = defaultdict(lambda: itertools.cycle((10.0, 100.0)))
    return lambda launch: next(times[launch.block])


@pytest.mark.fault("N6")
def test_timings_that_scatter_are_repeated_and_flagged(machine: Machine) -> None:
    machine.us = scattering()
    tuned(32, 64)
    assert len(machine.launches) > 4 * (9 + 27)
    assert "scatter too much" in entry(machine).why


@pytest.mark.fault("N6")
def test_one_later_process_compares_again_what_scattered(machine: Machine) -> None:
    launches = []
    for _ in range(4):
        machine.us = scattering()
        tuned(32, 64)
        launches.append(len(machine.launches))
        machine.restart()
    assert min(launches[:2]) > 9
    assert launches[2:] == [1, 1]


@pytest.mark.fault("N6")
def test_a_choice_beside_a_busy_gpu_is_mended_once_it_is_free(machine: Machine) -> None:
    machine.us = scattering()
    tuned(32, 64)
    machine.restart()
    machine.us = lambda launch: 20.0 if launch.block == 64 else 90.0
    assert tuned(32, 64).best_config.kwargs == {"BLOCK": 64}
    assert not machine.jobs
    machine.restart()
    assert tuned(32, 64).best_config.kwargs == {"BLOCK": 64}
    assert len(machine.launches) == 1


@pytest.mark.fault("N7")
def test_triton_hooks_see_the_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tuned()
    hook = object()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    x = torch.zeros(64)
    kernel[(1,)](x, None, x, 64)
    assert machine.launches[-1].hook is hook


@pytest.mark.fault("B41")
def test_nothing_holds_the_arguments_afterwards(machine: Machine) -> None:
    def refuse(launch: Launch) -> None:
        if launch.options["num_warps"] == 8:
            raise OutOfResources(1, 0, "registers")

    machine.effect = refuse
    own = [c for warps in (4, 8) for c in configs(*(2**i for i in range(4, 10)), num_warps=warps)]
    kernel = costmodel.autotune(own, ["n"], check="agree")(triton.jit(add))
    x = torch.zeros(64)
    seen = weakref.ref(x)
    kernel[(1,)](x, None, x, 64)
    machine.launches.clear()
    del x
    gc.collect()
    assert seen() is None


# --- Files and processes --------------------------------------------------------------------------

POISON = [b"", b"[]", b"\0\xff" * 99, b'{"schema": 1}', b'{"schema": 99, "key": {}}\n', b"{" * 9999]


@pytest.mark.fault("B13")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("content", POISON, ids=range(len(POISON)))
def test_a_spoilt_file_is_tuned_anew_once(machine: Machine, content: bytes) -> None:
    tuned()
    (path,) = machine.folder.iterdir()
    for spoilt in (content, path.read_bytes()[:150] + content):
        path.write_bytes(spoilt)
        machine.restart()
        assert tuned().best_config.kwargs == {"BLOCK": 32}
        assert len(machine.jobs) == 3
        machine.restart()
        tuned()
        assert not machine.jobs


@pytest.mark.fault("B13")
def test_a_known_choice_that_is_not_in_the_list_is_no_choice(machine: Machine) -> None:
    tuned()
    found = entry(machine)
    KernelStore(machine.folder).choose(found.key, '{"kwargs":{"BLOCK":7}}', "a lie")
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 32}
    assert not machine.jobs


REFUSALS = [OutOfResources(1, 0, "registers"), PTXASError("no"), CompilationError("", None, "no")]


@pytest.mark.fault("B13")
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_known_choice_that_is_refused_now_is_tuned_anew_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    tuned()
    before = next(each for each in entry(machine).measured.items() if '"BLOCK":32' in each[0])
    compile_ = machine.compile

    def refuse(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        if not refused.isdisjoint(source.constants.values()):
            raise error
        return compile_(source, target, options)

    monkeypatch.setattr(triton.compiler, "compile", refuse)
    refused = {32}
    machine.restart()
    assert tuned(mode="never").best_config.kwargs == {"BLOCK": 64}
    KernelStore(machine.folder).note(entry(machine).key, *before)
    refused = {32, 64}
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 128}
    assert len(machine.jobs) == 3
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 128}
    assert len(machine.launches) == 1


@pytest.mark.fault("B13")
def test_a_finalist_that_is_refused_now_costs_that_configuration_only(machine: Machine) -> None:
    def refuse(launch: Launch) -> None:
        if launch.block == 32:
            raise OutOfResources(1, 0, "registers")

    tuned()
    (path,) = machine.folder.iterdir()
    path.write_text("\n".join(x for x in path.read_text().split("\n") if '"chosen"' not in x))
    machine.restart()
    machine.effect = refuse
    assert tuned().best_config.kwargs == {"BLOCK": 64}
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 64}
    assert len(machine.launches) == 1


@pytest.mark.fault("B13")
def test_a_mistaken_call_does_not_spoil_the_right_one(machine: Machine) -> None:
    def kernel(x_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.static_assert(KIND == "fast")
        tl.store(x_ptr + tl.arange(0, BLOCK), n, mask=tl.arange(0, BLOCK) < n)

    made = costmodel.autotune(configs(*BLOCKS), ["n"])(triton.jit(kernel))
    with pytest.raises(CompileError, match="none of 3"):
        made[(1,)](torch.zeros(64), 64, "typo")
    made[(1,)](torch.zeros(64), 64, "fast")
    assert made.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.fault("B22")
def test_timings_that_cannot_be_kept_are_one_warning(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    machine.folder = tmp_path / "file" / "kernels"
    machine.restart()
    with pytest.warns(RuntimeWarning, match="this process only") as told:
        kernel = tuned()
    assert len(told) == 1
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    machine.jobs.clear()
    tuned()  # another tuner of this process knows it
    assert not machine.jobs


@pytest.mark.fault("N3")
def test_a_machine_that_cannot_compile_still_launches(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise HostError("no temporary folder: set TMPDIR")

    monkeypatch.setattr(machine, "submit", fails)
    with pytest.warns(RuntimeWarning, match="add is not tuned: no temporary folder"):
        kernel = tuned()
    assert machine.timed() == {64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros(64)
        kernel[(1,)](x, None, x, 64)
    assert machine.timed() == {64}


@pytest.mark.fault("N3")
def test_a_machine_that_compiles_again_tunes_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: Future[Artifact] = Future()
    failed.set_exception(HostError("the temporary folder is gone"))
    with monkeypatch.context() as patch:
        patch.setattr(machine, "submit", lambda *_, **__: failed)
        with pytest.warns(RuntimeWarning, match="the temporary folder is gone"):
            tuned(32, 64, 128)
    kernel = tuned(64, 32)
    assert len(machine.jobs) == 2
    assert kernel.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.fault("N3")
def test_a_gpu_that_is_full_while_timing_still_launches(machine: Machine) -> None:
    def allocate(launch: Launch) -> None:
        if len(machine.launches) <= full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    machine.effect, full = allocate, 3
    tuned()
    assert len(machine.launches) == 4
    full = 0
    machine.restart()
    assert tuned().best_config.kwargs == {"BLOCK": 32}
    machine.restart()
    tuned()
    assert len(machine.launches) == 1


@pytest.mark.fault("B41")
def test_a_full_gpu_still_launches(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune_fakes.runner.torch, "zeros", full)
    with pytest.warns(RuntimeWarning, match="add is not tuned: CUDA out of memory"):
        tuned()
    assert machine.timed() == {64}


def in_a_fork(work: Any) -> Any:
    process = FORK.Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads
        process.start()
    return process


MANY = tuple(2**i for i in range(4, 12))


@pytest.mark.fault("B31")
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_loses_no_timing(machine: Machine, seed: int) -> None:
    told, tell = os.pipe()

    def child() -> None:
        begun: set[int] = set()

        def effect(launch: Launch) -> None:
            if launch.block not in begun:
                begun.add(launch.block)
                os.write(tell, b".")

        machine.effect, machine.slow_s = effect, 0.0005
        tuned(*MANY, mode="exhaustive")

    process = in_a_fork(child)
    os.close(tell)
    begun = os.read(told, 1)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    process.kill()
    process.join()
    while part := os.read(told, 99):
        begun += part
    os.close(told)
    done = kept(machine) if machine.folder.exists() else {}
    assert len(begun) - 1 <= len(done) <= len(begun)
    kernel = tuned(*MANY, mode="exhaustive")
    assert len(machine.jobs) == len(MANY) - len(done)
    assert kernel.best_config.kwargs == {"BLOCK": 16}


@pytest.mark.fault("B21")
def test_ten_processes_at_once(machine: Machine) -> None:
    barrier = FORK.Barrier(10)

    def child() -> None:
        barrier.wait()
        kernel = tuned()
        os._exit(kernel.best_config.kwargs["BLOCK"])

    processes = [in_a_fork(child) for _ in range(10)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [32] * 10
    assert set(kept(machine)) == set(BLOCKS)
    tuned()
    assert not machine.jobs


@pytest.mark.fault("B31")
def test_an_interrupt_keeps_what_was_timed_and_undoes_what_was_written(machine: Machine) -> None:
    def interrupt(launch: Launch) -> None:
        launch.named["out_ptr"].add_(1)
        if len({x.block for x in machine.launches}) == 3:
            signal.raise_signal(signal.SIGINT)

    machine.effect = interrupt
    kernel = costmodel.autotune(configs(*BLOCKS), ["n"])(triton.jit(add))
    x, out = torch.zeros(64), torch.full((64,), 5.0)
    with pytest.raises(KeyboardInterrupt):
        kernel[(1,)](x, None, out, 64)
    assert float(out[0]) == 5.0
    assert len(kept(machine)) == 2
    machine.effect = lambda launch: None
    kernel[(1,)](x, None, out, 64)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.slow
def test_a_second_process(tmp_path: Path) -> None:
    program = [sys.executable, autotune_fakes.__file__, str(tmp_path), "[64, 32, 128]", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first, second = (
        json.loads(subprocess.run(program, env=environment, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert first["compiled"] == 3
    assert first["best"] == second["best"] == 32
    assert second["compiled"] == 0
    assert second["launches"] == 1


class Faulty:
    """A pool with real children, of which some configurations kill or stop the compiler."""

    def __init__(self, pool: CompilePool) -> None:
        self.pool, self.start, self.size = pool, pool.start, pool.size

    def submit(self, key: str, spec: Any, compile_: Any, **options: Any) -> Future[Artifact]:
        kinds: dict[int, Any] = {8: os.abort, 2: functools.partial(time.sleep, 3600)}
        compile_ = kinds.get(compile_.args[0].options["num_warps"], compile_)
        return self.pool.submit(key, spec, compile_, **options)


@pytest.mark.slow
@pytest.mark.fault("B12", "B27")
def test_real_compilers_that_die_or_hang(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with CompilePool(2, limit_s=20.0) as pool:
        faulty = Faulty(pool)
        monkeypatch.setattr(compiling, "device_compilers", lambda: faulty)
        kernel = tuned(own=by_warps(8, 4, 2, 1))
    assert kernel.best_config.num_warps in (1, 4)
    found = {warps: m.status for warps, m in statuses(machine).items()}
    assert found == {1: "ok", 2: "timeout", 4: "ok", 8: "crashed"}
    assert "20 s" in statuses(machine)[2].error
