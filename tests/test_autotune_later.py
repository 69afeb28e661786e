"""What a tuner does after its first key, in a later process, and with answers that do not agree."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.compiler.compiler as triton_compiler
import triton.language as tl
from autotune_fakes import Launch, Machine, add, configs, machine_without_gpu, tuning
from test_collect import GOOD, RUN, FakeRunner, create

import costmodel
from costmodel.autotune import bundle
from costmodel.autotune.bundle import collect_kernels, write_kernel_bundle
from costmodel.autotune.options import Options
from costmodel.autotune.store import KernelStore
from costmodel.collect import Job, collect
from costmodel.compile.compiler import Artifact
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.dataset import Dataset
from costmodel.errors import CompileError, InvalidInput
from costmodel.files import digest, encode
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

H100 = Target.named("h100-sxm")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
REAL_COMPILE = triton.compiler.compile


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_without_gpu(tmp_path / "kernels") as machine:
        yield machine


def tuned(own: Any, function: Any = add, **options: Any) -> Any:
    """Tune for 64 elements; return the tuner and the output."""
    kernel = costmodel.autotune(own, ["n"], **options)(triton.jit(function))
    out = torch.zeros(64)
    kernel[(1,)](out, None, out, 64)
    return kernel, out


def split(x_ptr, out_ptr, acc_ptr, n, BLOCK: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store x to out; in parts, add it to acc."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if SPLIT > 1:
        tl.atomic_add(acc_ptr + at, x, mask=at < n)
    else:
        tl.store(out_ptr + at, x, mask=at < n)


def test_what_known_finalists_write_is_put_back(machine: Machine) -> None:
    """They were compiled by an earlier process, and write another argument than what is new."""

    def effect(launch: Launch) -> None:
        x, out, acc = (launch.named[name] for name in ("x_ptr", "out_ptr", "acc_ptr"))
        if launch.named["SPLIT"] > 1:
            acc.add_(x)
        else:
            out.copy_(x)

    machine.effect = effect
    machine.us = lambda launch: 10.0 + launch.block / 1000 - launch.named["SPLIT"]
    own = [triton.Config({"BLOCK": b, "SPLIT": s}) for b, s in ((32, 2), (64, 2), (32, 1))]
    for count in (2, 3):
        kernel = costmodel.autotune(own[:count], ["n"])(triton.jit(split))
        x, out, acc = torch.ones(64), torch.zeros(64), torch.zeros(64)
        kernel[(1,)](x, out, acc, 64)
        assert kernel.best_config.kwargs["SPLIT"] == 2
        assert acc.tolist() == [1.0] * 64, "one launch remains"
        machine.restart()


def test_only_what_may_be_written_is_copied_for_later_keys(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", REAL_COMPILE)
    kernel = costmodel.autotune(configs(32, 64), ["n"])(triton.jit(add))
    weight, out = torch.zeros(1_000_000), torch.zeros(64)
    copied: list[int] = []
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append(tensor.numel())
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    for n in (1001, 1003):  # Triton compiles the same kernels for both
        kernel[(1,)](weight, weight, out, n)
    assert copied
    assert max(copied) <= out.nbytes  # as bytes


def reduce(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up; with 16 warps this takes more shared memory than with 4."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def test_what_the_driver_has_refused_it_refuses_for_the_next_key_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_compiler, "max_shared_mem", lambda device: 20)  # bytes
    monkeypatch.setattr(triton.compiler, "compile", REAL_COMPILE)
    monkeypatch.setattr(tuning.Tuning, "ranked", lambda self: [*kernel.configs])
    own = [triton.Config({"BLOCK": 1024}, num_warps=warps) for warps in (16, 4)]
    kernel = costmodel.autotune(own, ["n"], mode="predict")(triton.jit(reduce))
    x = torch.zeros(1024)
    for n in (1001, 1003):
        kernel[(1,)](x, x, n)
        assert kernel.best_config.num_warps == 4


def test_prediction_asks_the_model_for_every_key(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    own = tuning.predicted

    def predicted(target: Any, names: Any, sizes: Any, binaries: Any, *rest: Any) -> Any:
        asked.append((len(names), len(binaries)))
        return own(target, names, sizes, binaries, *rest)

    monkeypatch.setattr(tuning, "predicted", predicted)
    kernel = costmodel.autotune(configs(32, 64, 128), ["n"], mode="predict")(triton.jit(add))
    x = torch.zeros(64)
    for n in (1001, 1003, 1005):
        kernel[(1,)](x, None, x, n)
        assert (3, 3) in asked, "with the facts about all three binaries"
        asked.clear()


def test_a_prediction_keeps_nothing(machine: Machine) -> None:
    for _ in range(2):
        tuned(configs(32, 64, 128), mode="predict")
        assert not machine.folder.exists() or not [*machine.folder.iterdir()]
        machine.restart()


@pytest.mark.parametrize(
    ("blocks", "wrong", "fast_us", "mode"),
    [([2**i for i in range(1, 11)], {2, 4, 8, 16}, None, "exhaustive"),
     ([16, 32, 64, 128], {16}, 1.0, "auto")],
    ids=["four of ten are wrong", "one is, and ten times as fast"],
)  # fmt: skip
def test_who_is_outvoted_does_not_win(
    machine: Machine, blocks: list[int], wrong: set[int], fast_us: float | None, mode: str
) -> None:
    def effect(launch: Launch) -> None:
        launch.named["out_ptr"][: 32 if launch.block in wrong else 64] = 1.0

    machine.effect = effect
    machine.us = lambda launch: fast_us if fast_us and launch.block in wrong else 10 + launch.block
    kernel, out = tuned(configs(*blocks), check="agree", mode=mode)
    assert kernel.best_config.kwargs["BLOCK"] not in wrong
    assert out.tolist() == [1.0] * 64


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
     RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["of torch", "of the driver, which loads a binary"],
)  # fmt: skip
def test_a_full_card_is_no_lasting_refusal(machine: Machine, error: Exception) -> None:
    def effect(launch: Launch) -> None:
        if is_full and launch.block == 16:
            raise error

    machine.effect, is_full = effect, True
    tuned(configs(16, 32, 64))
    is_full = False
    machine.restart()
    machine.us = lambda launch: float(launch.block)
    for blocks in ((16, 32, 64), (16, 32, 64, 128)):  # what is new makes it look again
        kernel, _ = tuned(configs(*blocks))
    assert kernel.best_config.kwargs == {"BLOCK": 16}


# --- bundles ------------------------------------------------------------------------------------


SCRIPT = """
import torch, triton, triton.language as tl, costmodel

def prune(configs, named, **_):
    return [c for c in configs if c.kwargs["BLOCK"] <= named["n"]]

def twice(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

def call():
    for n in (64, 96):
        tuned[(1,)](torch.zeros(n), n)

def of(*numbers, **options):
    return [triton.Config({"BLOCK": b}, **options) for b in numbers]

def tune(tuner, configs, **options):
    return tuner(configs, key=["n"], **options)(triton.jit(twice))

"""


def collected(tmp_path: Path, line: str, number: int = 1, parts: int = 1) -> Path:
    """Time the calls of a script, as on a machine with a GPU; return the folder of timings."""
    work = tmp_path / f"{number}-{parts}"
    work.mkdir()
    file = work / "my_kernels.py"
    file.write_text(SCRIPT + line)
    (work / "calls.json").write_bytes(encode({"source": digest(file.read_bytes(), 64)}))
    collect_kernels(f"{file}:call", work, work / "out", number, parts)
    return work / "out"


@pytest.mark.parametrize("tuner", ["triton.autotune", "costmodel.autotune"])
def test_a_bundle_times_all_in_a_child_whatever_decorates_the_kernel(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuner: str
) -> None:
    children = []

    class Child(tuning.KernelRunner):  # type: ignore[misc]
        """Times here what a child would time on a GPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            children.append(args)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(tuning, "IsolatedRunner", Child)
    machine.us = lambda launch: 100.0 + abs(launch.block - 64)
    blocks = ", ".join(str(2**b) for b in range(4, 16))
    out = collected(tmp_path, f"tuned = tune({tuner}, of({blocks}))")
    entries = KernelStore(out).entries()
    assert [len(entry.measured) for entry in entries] == [12, 12]
    assert len(children) == 2


@pytest.mark.parametrize(
    ("line", "launched"),
    [('of(256, 64, 32), prune_configs_by={"early_config_prune": prune}', {32, 64}),
     ("of(64, num_warps=3) + of(64, 32)", {32, 64})],
    ids=["pruned by the user", "refused by the backend"],
)  # fmt: skip
def test_calls_of_other_parts_are_launched_with_what_works(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str,
    launched: set[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(bundle, "Options", lambda **_: Options(mode="exhaustive"))  # not in a child
    for part in (1, 2):
        collected(tmp_path, f"tuned = tune(triton.autotune, {line})", part, 2)
        assert {launch.block for launch in machine.launches} <= launched
        assert {launch.named["n"] for launch in machine.launches} == {64, 96}
        machine.launches.clear()


def test_a_script_finds_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "sizes_of_mine.py").write_text("N = 1000\n")
    (tmp_path / "mine.py").write_text("import sizes_of_mine\ndef call(): pass\n")
    with pytest.raises(InvalidInput, match="calls no kernel"):
        write_kernel_bundle(tmp_path / "k", f"{tmp_path}/mine.py:call", H100, tmp_path / "work")


# --- collecting ---------------------------------------------------------------------------------


def test_anchors_that_a_bundle_lacks_are_told_and_make_no_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second bundle, collected into the same folder, knows nothing of the first one's."""

    def binaries(jobs: list[Job], folder: Path) -> ArtifactTable:
        data = create(folder)
        specs = {specialize(job.workload, config) for job in jobs for config in job.configs}
        keys = {spec: artifact_key(spec, data.target) for spec in specs}
        data.append_artifacts(Artifact(k, s, registers=9, ptx_hash=k) for s, k in keys.items())
        return data.artifacts()

    out = create(tmp_path / "out")
    first = [Job(Workload.dense(4096, 4096, k), GOOD[:2]) for k in (1024, 2048)]
    second = [Job(Workload.dense(4096, 4096, 1000, b_layout="col"), GOOD[4:6])]
    for i, jobs in enumerate((first, second)):
        known = binaries(jobs, tmp_path / str(i))
        collect(jobs, out, FakeRunner(), replace(RUN, run_id=f"run-{i}"), known=known)
        out.compact()
    assert caplog.text.count("is not timed again: no binary is known") == 2
    anchors = Dataset.open(out.path).measurements("anchor")
    assert {str(status) for status in anchors.status} == {"ok"}


@pytest.mark.parametrize("mode", ["auto", "exhaustive"])
def test_the_budget_ends_the_wait_for_a_binary(machine: Machine, mode: str) -> None:
    """A block that is far too large may compile for a minute."""
    submit = machine.submit

    def some(key: str, *args: Any, **options: Any) -> Any:
        done = submit(key, *args, **options)
        return Future() if machine.jobs[-1].options["num_warps"] == 8 else done

    machine.submit = some  # type: ignore[method-assign]
    own = [*configs(32, 64), *configs(16, num_warps=8)]
    kernel, _ = tuned(own, mode=mode, budget_s=0.3)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


def test_what_is_frozen_in_the_background_mode_is_the_best(machine: Machine) -> None:
    """The kernel that is returned stays as it is, so it is worth the wait for the compiles."""
    submit = machine.submit

    def later(*args: Any, **options: Any) -> Any:
        future, artifact = Future[Any](), submit(*args, **options).result()
        threading.Timer(0.1, future.set_result, [artifact]).start()
        return future

    machine.submit = later  # type: ignore[method-assign]
    kernel = costmodel.autotune(configs(64, 32, 128), ["n"], mode="background")(triton.jit(add))
    out = torch.zeros(64)
    assert kernel.frozen(out, None, out, 64, grid=(1,)).configs[0].kwargs == {"BLOCK": 32}


def test_relatives_are_the_newest_files(tmp_path: Path) -> None:
    """Those of older versions of a kernel are left behind, and would hide them."""
    store = KernelStore(tmp_path)

    def key(source: str, n: int) -> dict[str, Any]:
        return {"name": "k", "source": source, "device": "d", "triton": "t", "key": {"n": n}}

    for n in range(100):
        store.describe(key("old" if n < 90 else "new", n), {})
        path = max(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.utime(path, (n, n))
    found = store.relatives(key("new", 100))
    assert sorted(entry.key["key"]["n"] for entry in found) == [*range(90, 100)]
    assert len(store.relatives(key("old", 100))) == 22


def test_a_misspelled_constant_costs_its_configuration(machine: Machine) -> None:
    own = [*configs(64, 32), triton.Config({"BLOCK": 16, "BLOK": 8})]
    with pytest.warns(RuntimeWarning, match="did you mean BLOCK"):
        kernel, _ = tuned(own)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    with pytest.raises(CompileError, match="BLOK"):
        tuned([triton.Config({"BLOCK": b, "BLOK": 8}) for b in (16, 32)])


def test_why_triton_cannot_start_is_told_before_its_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a cache folder that cannot be written, or without a C compiler."""

    def refused() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/sys/triton")

    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", refused)
    warned = pytest.warns(RuntimeWarning, match="add is not tuned: .*TRITON_CACHE_DIR")
    with warned, pytest.raises(PermissionError, match="/sys/triton"):
        tuned(configs(32, 64))


def test_a_cache_below_a_file_is_one_warning(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(tuning, "store", KernelStore(file / "kernels"))
    with pytest.warns(RuntimeWarning, match="the cache cannot be used") as told:
        kernel, _ = tuned(configs(32, 64))
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert len(told) == 1
    assert [record.message for record in caplog.records] == []
