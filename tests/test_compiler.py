"""Compiling without a GPU: real compiles, and compilers that abort, hang or raise."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from costmodel.compile.compile_pool import CompilePool, as_compiled
from costmodel.compile.compiler import Artifact, compile_source
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.specialize import artifact_key, compile_many, source, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain

WORKLOAD = Workload.dense(4096, 4096, 4096)
# The faults below compile nothing: their target needs no ptxas.
FAKE_TARGET = Target.named("h100-sxm", Toolchain("0", "0"))


def spec_of(kernel: str, m: int, n: int, k: int, *rest: int, **extra: int) -> Specialization:
    return specialize(WORKLOAD, GemmConfig(kernel, m, n, k, *rest, **extra))  # type: ignore[arg-type]


GOOD = spec_of("tma", 64, 64, 32, 4, 2)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This module, under a name that a child process can import."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("test_compiler")


# --- compilers with faults: what to do is in BLOCK_K ---------------------------------------------


def faulty_compile(spec: Specialization, target: Target, dump: Path | None) -> Artifact:
    match spec.config_binary[3]:
        case 16:
            print("LLVM ERROR: out of patience", file=sys.stderr, flush=True)
            os.abort()
        case 32:
            pid = subprocess.Popen(["sleep", "1000"]).pid  # a ptxas that never returns
            assert dump is not None
            (dump / "pid").write_text(str(pid))
            time.sleep(1000)
        case 64:
            raise KeyError("a bug of ours")
    return Artifact(artifact_key(spec, target), spec, registers=os.getpid())


def hang(spec: Specialization, target: Target, dump: Path | None) -> Artifact:
    time.sleep(1000)
    raise AssertionError


def litter(spec: Specialization, target: Target, dump: Path | None) -> Artifact:
    """Leave files behind, as Triton does when ptxas fails."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(delete=False):
        pass
    return Artifact(artifact_key(spec, target), spec, error=f"{knobs.cache.dir}")


def submitted(
    pool: CompilePool,
    spec: Specialization,
    compile_: Callable[[Specialization, Target, Path | None], Artifact],
    dump: Path | None = None,
) -> Future[Artifact]:
    compiling = functools.partial(compile_, spec, FAKE_TARGET, dump)
    return pool.submit(artifact_key(spec, FAKE_TARGET), spec, compiling)


def compile_here(spec: Specialization, target: Target) -> Artifact:
    return compile_source(
        lambda: source(spec), target.device.arch, artifact_key(spec, target), spec
    )


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_a_pool_keeps_its_children_for_the_next_batch(here: ModuleType) -> None:
    specs = [spec_of("pointer", 64, 64, depth) for depth in (128, 256, 512, 1024)]

    def children(pool: CompilePool, *chosen: Specialization) -> set[int]:
        made = [submitted(pool, spec, here.faulty_compile) for spec in chosen]
        return {future.result().registers for future in made}

    with CompilePool(2) as pool:
        first = children(pool, *specs[:2])
        assert children(pool, *specs[2:]) <= first
        assert len(first) <= 2
    assert all(gone(pid) for pid in first)


def test_what_is_queued_can_be_hurried(here: ModuleType) -> None:
    specs = [spec_of("pointer", 64, 64, depth) for depth in (128, 256, 512, 1024)]
    done: list[int] = []
    with CompilePool(1) as pool:
        made = [submitted(pool, spec, here.faulty_compile) for spec in specs]
        for i, future in enumerate(made):
            future.add_done_callback(lambda _, i=i: done.append(i))  # type: ignore[misc]
        pool.hurry(made[3], 1)
        pool.hurry(made[0], 2)  # which is being compiled already
        assert all(future.result().ok for future in made)
    assert done.index(3) < done.index(1) < done.index(2)


@pytest.mark.fault("B27", "B31")
def test_a_pool_that_is_closed_cancels_what_is_queued_and_kills_the_rest(here: ModuleType) -> None:
    specs = [spec_of("pointer", 64, 64, depth) for depth in (128, 256, 512)]
    with CompilePool(1) as pool:
        first = submitted(pool, specs[0], here.faulty_compile)
        child = first.result().registers
        left = [submitted(pool, spec, here.hang) for spec in specs[1:]]
        while not left[0].running():
            time.sleep(0.01)
    assert left[0].result(60).status == "crashed"
    assert left[1].cancelled()
    assert gone(child)
    with pytest.raises(RuntimeError, match="closed"):
        submitted(pool, specs[0], here.hang)


def test_children_of_a_pool_end_when_nothing_is_compiled(here: ModuleType) -> None:
    spec = spec_of("pointer", 64, 64, 128)
    with CompilePool(1, idle_s=0.2) as pool:
        children = set()
        for _ in range(2):
            made = submitted(pool, spec, here.faulty_compile).result()
            children.add(made.registers)
            deadline = time.monotonic() + 60
            while not gone(made.registers):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert len(children) == 2


@pytest.mark.fault("B12", "B27")
def test_an_abort_and_a_hang_are_one_failed_row_each(here: ModuleType, tmp_path: Path) -> None:
    depths = (128, 16, 256, 32, 512, 1024)
    specs = [spec_of("pointer", 16, 16, k) for k in depths]
    with CompilePool(2, limit_s=6) as pool:
        futures = [submitted(pool, spec, here.faulty_compile, tmp_path) for spec in specs]
        artifacts = {a.spec.config_binary[3]: a for a in as_compiled(futures)}
    assert {k: a.status for k, a in artifacts.items()} == {
        128: "ok", 16: "crashed", 256: "ok", 32: "timeout", 512: "ok", 1024: "ok",
    }  # fmt: skip
    assert [artifacts[k].key for k in depths] == [artifact_key(s, FAKE_TARGET) for s in specs]
    assert artifacts[16].error == (
        "the compiler's process was killed by SIGABRT: LLVM ERROR: out of patience"
    )
    assert artifacts[32].error == "not compiled within 6 s"
    assert artifacts[32].compile_s >= 6
    assert gone(int((tmp_path / "pid").read_text()))


PROGRAM = """
import threading, time
from pathlib import Path
from costmodel.compile.compile_pool import CompilePool
import test_compiler as here

folder = Path({folder!r})

def compile_all():
    specs = [here.spec_of("pointer", m, n, 128) for m in (16, 32, 64) for n in (16, 32, 64)]
    pool = CompilePool(2, limit_s=3600)
    futures = [here.submitted(pool, spec, here.note_and_hang, folder) for spec in specs]
    if {where!r} == "daemon":
        futures[0].result()

if {where!r} == "daemon":
    threading.Thread(target=compile_all, daemon=True).start()
else:
    compile_all()
while len([*folder.glob("begun-*")]) < 2:
    time.sleep(0.01)
print("the main thread is done", flush=True)
"""


def note_and_hang(spec: Specialization, target: Target, dump: Path | None) -> Artifact:
    assert dump is not None
    (dump / f"begun-{os.getpid()}-{time.monotonic_ns()}").touch()
    return hang(spec, target, dump)


@pytest.mark.fault("B27")
@pytest.mark.parametrize("where", ["main", "daemon"])
def test_the_interpreter_ends_while_compiles_are_queued(tmp_path: Path, where: str) -> None:
    """And begins none of them. No limit of theirs would end this in time."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path), where=where)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    found = done.returncode, done.stdout, done.stderr
    assert found == (0, "the main thread is done\n", "")
    begun = [*tmp_path.glob("begun-*")]
    assert len(begun) == 2
    assert all(gone(int(path.name.split("-")[1])) for path in begun)


def test_unknown_exceptions_propagate(here: ModuleType) -> None:
    specs = [spec_of("pointer", 16, 16, k) for k in (128, 64)]
    with CompilePool(2) as pool, pytest.raises(KeyError, match="a bug of ours"):
        list(as_compiled([submitted(pool, spec, here.faulty_compile) for spec in specs]))


@pytest.mark.fault("B27")
def test_closing_a_pool_kills_what_its_children_started(here: ModuleType, tmp_path: Path) -> None:
    specs = [spec_of("pointer", 16, 16, k) for k in (128, 32)]
    with CompilePool(2) as pool:
        artifacts = as_compiled([submitted(pool, s, here.faulty_compile, tmp_path) for s in specs])
        next(artifacts)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        start = time.monotonic()
        artifacts.close()
    assert time.monotonic() - start < 100
    time.sleep(0.1)
    assert gone(int((tmp_path / "pid").read_text()))


def test_nothing_is_left_on_disk_nor_in_the_environment(
    here: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = dict(os.environ)
    specs = [spec_of("pointer", 16, 16, k) for k in (16, 32)]
    with CompilePool(1) as pool:
        futures = [submitted(pool, spec, here.litter) for spec in specs]
        folders = {future.result().error for future in futures}
    assert len(folders) == 2, "each compile has a cache of its own"
    assert all(Path(f).is_relative_to(tmp_path) for f in folders)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


def test_no_specs_and_bad_n_jobs() -> None:
    assert list(compile_many([], FAKE_TARGET)) == []
    with pytest.raises(InvalidInput, match="n_jobs=0"):
        list(compile_many([GOOD], FAKE_TARGET, n_jobs=0))


# --- the real compiler ---------------------------------------------------------------------------


@pytest.mark.fault("B40")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target_name", "config", "tensor_core"),
    [
        ("a100-sxm", GemmConfig("pointer", 64, 64, 32, 4, 3), "loop_mma_sync"),
        ("h100-sxm", GemmConfig("tma", 64, 64, 64, 4, 3), "loop_wgmma"),
        ("b200-sxm", GemmConfig("tma", 128, 64, 64, 4, 3), "loop_tcgen05_mma"),
    ],
)
def test_a_good_spec_compiles_for_each_architecture(
    target_name: str, config: GemmConfig, tensor_core: str
) -> None:
    target, spec = Target.named(target_name), specialize(WORKLOAD, config)
    (artifact,) = compile_many([spec], target, n_jobs=1)
    assert (artifact.status, artifact.error) == ("ok", "")
    assert artifact.key == artifact_key(spec, target)
    assert 16 <= artifact.registers <= 255
    assert artifact.spill_bytes == 0
    operands_bytes = 3 * 2 * config.block_k * (config.block_m + config.block_n)
    assert operands_bytes / 2 <= artifact.shared_bytes <= 2 * operands_bytes
    assert set(artifact.ptx) == set(PTX_FEATURES)
    assert artifact.ptx[tensor_core] > 0


@pytest.mark.fault("B14")
@pytest.mark.slow
def test_what_the_compiler_refuses_is_a_row_with_a_reason(tmp_path: Path) -> None:
    refused = {
        # too few registers for its wgmma, and for 64 warps
        spec_of("tma", 128, 128, 64, 4, 3, maxnreg=80): "PTXASError: ptxas: .*Insufficient regis",
        # a static_assert of the kernel
        spec_of("tma", 64, 64, 8, 4, 3): r"CompileTimeAssertionFailure: tl.static_assert\(BLOCK",
        # a tile that is larger than Triton allows
        spec_of("pointer", 2048, 1024, 64, 4, 3): "ValueError: numel",
    }
    target = Target.named("h100-sxm")
    found = {a.spec: a for a in compile_many([*refused, GOOD], target, n_jobs=2, dump=tmp_path)}
    good = found.pop(GOOD)
    assert good.ok
    assert {a.status for a in found.values()} == {"compile_error"}
    for spec, reason in refused.items():
        assert re.match(reason, found[spec].error)
        assert len(found[spec].error) <= 500
        assert "/" not in found[spec].error, "no names of temporary files"
        assert found[spec].key == artifact_key(spec, target)

    assert ".target sm_90a" in (tmp_path / f"{good.key}.ptx").read_text()
    assert "gemm_tma" in (tmp_path / f"{good.key}.sass").read_text()
    row = json.loads((tmp_path / f"{good.key}.json").read_text())
    assert row["registers"] == good.registers
    assert row["spec"]["code"]["dtype"] == "float16"
    assert {p.stem for p in tmp_path.glob("*.json")} == {a.key for a in (good, *found.values())}
    assert len(list(tmp_path.glob("*.sass"))) == 1


@pytest.mark.fault("B14")
@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("`ptxas` failed with error code -9\n`ptxas` stderr:\n", "crashed"),
        ("`ptxas` raised SIGSEGV\n`ptxas` stderr:\n", "crashed"),
        ("`ptxas` failed with error code 255\n`ptxas` stderr:\nptxas fatal : no", "compile_error"),
        ("Internal Triton PTX codegen error\n`ptxas` stderr:\n", "compile_error"),
    ],
)
def test_a_ptxas_that_was_killed_refused_nothing(
    monkeypatch: pytest.MonkeyPatch, told: str, status: str
) -> None:
    import triton
    from triton.runtime.errors import PTXASError

    def fails(*_: object, **__: object) -> None:
        raise PTXASError(told)

    monkeypatch.setattr(triton, "compile", fails)
    found = compile_here(GOOD, FAKE_TARGET)
    assert (found.status, found.error.startswith("PTXASError: ")) == (status, True)


@pytest.mark.slow
def test_two_processes_give_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child (even if this process interprets kernels) and here: the same artifact."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        target = Target.named("h100-sxm")
        here = compile_here(GOOD, target)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cache = tmp_path / "shared"
    (there,) = compile_many([GOOD, GOOD], target, n_jobs=1, cache=cache)
    assert list(cache.rglob("*.cubin")), "left for a process that is to load it"
    assert here.ok
    assert dataclasses.replace(here, compile_s=0) == dataclasses.replace(there, compile_s=0)


@pytest.mark.fault("B40")
@pytest.mark.slow
def test_a_binary_from_a_warm_cache_has_the_same_features(tmp_path: Path) -> None:
    """A process that compiles nothing, since Triton's cache has it, knows as much of it."""
    target = Target.named("h100-sxm")
    (first,) = compile_many([GOOD], target, n_jobs=1, cache=tmp_path)
    (again,) = compile_many([GOOD], target, n_jobs=1, cache=tmp_path)
    assert again.compile_s < first.compile_s
    assert first.ok
    assert set(again.ptx) == set(PTX_FEATURES)
    assert dataclasses.replace(again, compile_s=0) == dataclasses.replace(first, compile_s=0)


@pytest.mark.fault("B40", "B61")
@pytest.mark.slow
def test_spills_are_the_stack_of_the_binary() -> None:
    tight, free = (spec_of("pointer", 128, 64, 32, 4, 2, maxnreg=r) for r in (40, 0))
    target = Target.named("a100-sxm")
    found = {a.spec: a for a in compile_many([tight, free], target, n_jobs=2)}
    assert found[tight].registers == 40
    assert found[tight].spill_bytes > 0
    assert found[free].spill_bytes == 0
