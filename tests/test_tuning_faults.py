"""A tuning that tries a part of a list survives odd lists, odd files, threads and stragglers."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import autotune_fakes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import Machine, add, configs, machine_without_gpu, ttir

import costmodel
from costmodel.autotune import prior
from costmodel.autotune.learner import Learner, Tried
from costmodel.autotune.store import KernelEntry, KernelStore
from costmodel.errors import CostModelError, HostError

ROOT = Path(__file__).resolve().parent.parent
MANY = tuple(range(16, 56))
"""Block sizes of a list of which a part is tried."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    with machine_without_gpu(tmp_path / "kernels") as machine:
        yield machine
        monkeypatch.undo()  # what a test has put over the stand-ins goes before them


def kernel_of(own: list[triton.Config], function: Any = add, **options: Any) -> Any:
    return costmodel.autotune(own, ["n"], **options)(triton.jit(function))


def call(kernel: Any, n: int = 64) -> None:
    x = torch.zeros(64)
    kernel[(1,)](x, None, x, n)


def in_turn(kernel: Any, *sizes: int) -> None:
    for n in sizes:
        call(kernel, n)


def in_threads(work: Any, count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def entry_of(machine: Machine) -> KernelEntry:
    (entry,) = KernelStore(machine.folder).entries()
    return entry


# --- Lists ----------------------------------------------------------------------------------------

ODD = {
    "no stages": [triton.Config({"BLOCK": b}, num_stages=None) for b in (16, 32)],
    "no warps": [triton.Config({"BLOCK": b}, num_warps=None) for b in (16, 32)],
    "huge": [triton.Config({"BLOCK": 32, "KIND": x}) for x in (2**70, 1, -(2**1100), 0)],
    "far apart": [triton.Config({"BLOCK": 32, "KIND": x}) for x in (1e308, -1e308, 1e-300)],
    "texts and numbers": [triton.Config({"BLOCK": 32, "KIND": x}) for x in ("a", 3, None, True)],
}


@pytest.mark.parametrize("case", ODD)
def test_odd_configurations_are_tuned(machine: Machine, case: str) -> None:
    def odd(x_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + tl.arange(0, BLOCK), n)

    machine.us = lambda launch: 9.0 + (launch.options != machine.launches[0].options)
    own = [triton.Config({"KIND": 0} | c.kwargs, c.num_warps, c.num_stages) for c in ODD[case]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = kernel_of(own, odd)
        for n in (64, 4096):  # the second has a relative
            kernel[(1,)](torch.zeros(64), n)
    assert kernel.best_config in own


def test_exhaustive_tries_what_another_mode_has_left(machine: Machine) -> None:
    call(kernel_of(configs(*MANY)))
    assert len(machine.timed()) < len(MANY)
    machine.restart()
    call(kernel_of(configs(*MANY), mode="exhaustive"))
    assert len(entry_of(machine).measured) == len(MANY)
    machine.restart()
    call(kernel_of(configs(*MANY), mode="exhaustive"))
    assert len(machine.launches) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_what_must_be_tried_is_though_programs_are_equal(machine: Machine, count: int) -> None:
    """A hook makes of one binary several configurations."""
    launched: list[int] = []

    def hook(number: int) -> Any:
        return lambda named: launched.append(number)

    musts = [triton.Config({"BLOCK": 32}, pre_hook=hook(i)) for i in range(count)]
    for i, config in enumerate(musts):
        config.kwargs["BLOCK"] = 32
        config.pre_hook.__qualname__ = f"hook{i}"
    machine.us = lambda launch: 1.0 if launched and launched[-1] == 0 else 100.0 + launch.block
    kernel = kernel_of([*musts, *configs(*MANY)])
    kernel.fn.must_try = lambda config: config.pre_hook is not None
    call(kernel)
    assert set(launched) == set(range(count))
    assert kernel.best_config is musts[0]


def test_a_long_list_is_compiled_as_it_is_where_nothing_is_learned() -> None:
    """Where all are tried, no time goes into choosing which."""
    parsed = [
        {"kwargs": {"BLOCK": i % 16, "K": i // 16}, "num_warps": 4, "num_stages": 3, "num_ctas": 1,
         "maxnreg": None} for i in range(250)
    ]  # fmt: skip
    count = len(parsed)
    now = Tried(parsed, np.zeros(count), np.full(count, np.nan), {})
    learner, begun = Learner(now, least=count), time.thread_time()
    found = []
    while (row := learner.next()) is not None:
        learner.tell(row, 1.0 + row)
        found.append(row)
    assert sorted(found) == list(range(count))
    assert time.thread_time() - begun < 1.0


# --- Files ----------------------------------------------------------------------------------------

LINES = [
    {"config": "x", "measurement": {"status": "ok", "latency_us": 1.0}},
    {"config": "[]", "measurement": {"status": "ok", "latency_us": 1.0}},
    {"config": "{}", "measurement": {"status": "ok", "latency_us": 1.0}},
    {"config": '{"kwargs":3}', "measurement": {"status": "ok", "latency_us": 1.0}},
    {"chosen": "x", "why": "", "when": "", "untried": [{}]},
    {"chosen": "x", "why": "", "when": "", "untried": "x"},
]


@pytest.mark.fault("B13")
@pytest.mark.parametrize("n", [64, 4096])
@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_lines_that_nobody_wrote_cost_nothing(machine: Machine, line: Any, n: int) -> None:
    """Neither the call that they are of, nor one that learns from it."""
    call(kernel_of(configs(*MANY)))
    with entry_of(machine).path.open("a") as file:
        file.write(f"\n{json.dumps(line)}")
    machine.restart()
    kernel = kernel_of(configs(*MANY))
    call(kernel, n)
    assert kernel.best_config.kwargs == {"BLOCK": 16}


@contextmanager
def damaged_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: bytes | None
) -> Iterator[None]:
    """Ship a model of kernels of which a file has another content; None: it is missing."""
    shutil.copytree(prior.shipped_models("kernels-")["h200-sxm"], folder)
    (part,) = folder.glob(file)
    part.unlink()
    if content is not None:
        part.write_bytes(content)
    monkeypatch.setattr(prior, "shipped_models", lambda kind: {"h200-sxm": folder})
    prior._load.cache_clear()
    try:
        yield
    finally:
        prior._load.cache_clear()


@pytest.mark.fault("B03")
@pytest.mark.parametrize("content", [None, b"", b"no trees"])
@pytest.mark.parametrize("file", ["before-*.ubj", "card.json"])
def test_a_damaged_model_is_one_warning(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: Any
) -> None:
    with damaged_model(tmp_path / "model", monkeypatch, file, content):
        kernel = kernel_of(configs(*MANY))
        with pytest.warns(RuntimeWarning, match="model of kernels cannot be used") as told:
            in_turn(kernel, 64, 4096)
        assert kernel.best_config.kwargs == {"BLOCK": 16}
        assert len(told) == 1


@pytest.mark.fault("B03")
@pytest.mark.parametrize("content", [None, b"", b"no trees"])
def test_damaged_trees_for_binaries_are_one_warning(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    """They are read when a mode asks for them; then the PTX score ranks."""
    with damaged_model(tmp_path / "model", monkeypatch, "after-*.ubj", content):
        kernel = kernel_of(configs(16, 32), mode="predict")
        with pytest.warns(RuntimeWarning, match="model of kernels cannot be used") as told:
            call(kernel)
        assert len(machine.launches) == 1
        assert len(told) == 1


PROGRAM = """
import sys
sys.argv = ["", {folder!r}, "[16, 32, 64, 128]", "0"]
import autotune_fakes
autotune_fakes.main()
from costmodel.autotune import prior
assert prior.model_for(90) is not None
print(*sys.modules.keys() & {{"xgboost", "pyarrow", "pandas", "sklearn", "scipy"}}, sep=",")
"""


@pytest.mark.slow
def test_a_tuning_imports_no_learning_library(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(Path(autotune_fakes.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path))],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [""]


def test_a_terminal_is_left_at_the_start_of_a_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    terminal = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    monkeypatch.setattr(autotune_fakes.tuning, "_SILENT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    call(kernel_of(configs(*MANY)))
    assert "tuning add" in "".join(written)
    assert "".join(written).endswith("\n")


# --- What is written ------------------------------------------------------------------------------


def either(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y_ptr + n if KIND else x_ptr + n, 1.0)


def kinds(first: int, last: int) -> list[triton.Config]:
    """Make configurations of which the last ones write another argument than the first ones."""
    rows = [(0, i) for i in range(first)] + [(1, i) for i in range(last)]
    return [triton.Config({"BLOCK": 16, "KIND": k}, num_stages=i + 1) for k, i in rows]


def work_of_either(launch: Any) -> None:
    launch.named["y_ptr" if launch.named["KIND"] else "x_ptr"].add_(1)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("winner", [0, 1])
def test_results_are_compared_though_others_are_written_later(
    machine: Machine, winner: int
) -> None:
    machine.effect = work_of_either
    machine.us = lambda launch: 9.0 + (launch.named["KIND"] != winner)
    kernel = kernel_of(kinds(10, 12), either, check="agree", mode="exhaustive")
    x, y = torch.zeros(64), torch.zeros(64)
    kernel[(1,)](x, y, 8)
    assert float(x[0]) + float(y[0]) == 1.0


def test_what_is_to_be_zero_is_put_back_where_no_launch_zeroes_it(machine: Machine) -> None:
    """A later tuning under the same key of Triton's finds what earlier calls have added up."""
    machine.effect = work_of_either
    machine.us = lambda launch: 9.0 - launch.named["KIND"]
    options = {"reset_to_zero": ["y_ptr"], "mode": "exhaustive"}
    kernel = costmodel.autotune(kinds(10, 2), [], **options)(triton.jit(either))
    x, y = torch.zeros(64), torch.full((64,), 7.0)
    for n in (8, 16, 17):  # of other kinds
        kernel[(1,)](x, y, n)
    assert float(y[0]) == 3.0


# --- Threads and stragglers -----------------------------------------------------------------------


@pytest.mark.fault("B15")
def test_launchers_are_waited_for_by_many_threads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = SimpleNamespace(join=lambda limit: None)
    monkeypatch.setattr(ttir, "build_launchers", lambda sources: building)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        kernels = [kernel_of(configs(16, 32, 64)) for _ in range(12)]
        for kernel in kernels:
            kernel.fn.cache_key  # noqa: B018
        in_threads(lambda i: in_turn(kernels[i], i, 64), 12)
    finally:
        sys.setswitchinterval(before)
    assert all(kernel.best_config.kwargs == {"BLOCK": 16} for kernel in kernels)


@pytest.mark.fault("N3")
def test_a_machine_without_threads_keeps_no_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(sources: Any) -> Any:
        raise HostError("can't start new thread")

    def own(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(out_ptr + tl.arange(0, BLOCK), n)

    with monkeypatch.context() as patch:
        patch.setattr(ttir, "build_launchers", build)
        kernel = kernel_of(configs(16, 32), own)
        with pytest.warns(RuntimeWarning, match="can't start new thread"):
            call(kernel)
    machine.restart()
    kernel = kernel_of(configs(16, 32), own)
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 16}
    assert machine.timed() == {16, 32}


class Later:
    """A pool of which some compiles end when a test says so."""

    def __init__(self, machine: Machine, slow: set[int]) -> None:
        self.machine, self.slow, self.size = machine, slow, 4
        self.submitted: list[int] = []
        self.waiting: dict[int, tuple[Future[Any], Any]] = {}

    def start(self, count: int) -> None:
        """As of a CompilePool."""

    def hurry(self, future: Future[Any], urgency: int) -> None:
        """As of a CompilePool."""

    def submit(self, key: str, spec: Any, compile_: Any, **options: Any) -> Future[Any]:
        stages = compile_.args[0].options["num_stages"]
        self.submitted.append(stages)
        made = self.machine.submit(key, spec, compile_, **options)
        if stages not in self.slow:
            return made
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a child has begun it
        self.waiting[stages] = future, made.result()
        return future

    def finish(self) -> None:
        for future, artifact in self.waiting.values():
            future.set_result(artifact)


def by_stages(*stages: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": 32}, num_stages=each) for each in stages]


@pytest.mark.fault("B49")
def test_a_straggler_that_is_being_compiled_is_not_compiled_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine_without_gpu(tmp_path, patience_s=0.0) as machine, monkeypatch.context() as patch:
        machine.us = lambda launch: 9.0 + launch.options["num_stages"]
        pool = Later(machine, {1})
        patch.setattr(autotune_fakes.compiling, "device_compilers", lambda: pool)
        call(kernel_of(by_stages(4, 3, 2, 1)))
        assert pool.submitted.count(1) == 1
        call(kernel_of(by_stages(4, 3, 2, 1)), 128)  # of another kind, with the same binaries
        assert pool.submitted.count(1) == 1
        pool.finish()
        kernel = kernel_of(by_stages(4, 3, 2, 1))
        call(kernel, 192)
        assert pool.submitted.count(1) == 1
        assert kernel.best_config.num_stages == 1


@pytest.mark.fault("B15")
def test_what_one_tuning_no_longer_wants_another_still_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tuners of one kernel wait for one compile; the first one gives it up."""
    with machine_without_gpu(tmp_path) as machine:
        shared: Future[Any] = Future()
        submit, asked = machine.submit, threading.Event()

        def queued(key: str, spec: Any, compile_: Any, **options: Any) -> Future[Any]:
            made = submit(key, spec, compile_, **options)
            if compile_.args[0].options["num_stages"] != 1:
                return made
            if asked.is_set():
                return made
            asked.set()
            threading.Timer(0.3, give_up).start()
            return shared

        def give_up() -> None:  # as the other tuning does at its end, and then the pool
            shared.cancel()
            shared.set_running_or_notify_cancel()

        monkeypatch.setattr(machine, "submit", queued)
        kernel = kernel_of(by_stages(4, 3, 2, 1))
        machine.us = lambda launch: 9.0 + launch.options["num_stages"]
        call(kernel)
        assert kernel.best_config.num_stages == 1


@pytest.mark.slow
@pytest.mark.fault("B15", "N2")
def test_threads_leave_the_filters_of_warnings_alone(machine: Machine) -> None:
    before = list(warnings.filters)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        kernels = [kernel_of(configs(*MANY)) for _ in range(8)]
        in_threads(lambda i: in_turn(kernels[i], i, 64, 128 + i), 8)
    finally:
        sys.setswitchinterval(interval)
    assert list(warnings.filters) == before


def test_of_a_long_list_no_less_is_tried(machine: Machine) -> None:
    """What has not had its turn yet does not count as tried."""
    own = [
        triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages, maxnreg=registers)
        for block in (16, 32, 64, 128, 256)
        for warps in (1, 2, 4, 8)
        for stages in (1, 2, 3, 4, 5)
        for registers in (None, 32, 64, 96, 128, 160)
    ]
    machine.us = lambda launch: 9.0 + launch.block / (1 + launch.options["num_warps"])
    call(kernel_of(own))
    assert 86 <= len(machine.jobs) < len(own)


@pytest.mark.fault("B15", "N2")
def test_threads_read_kernels_at_once_while_memory_is_collected() -> None:
    """CPython 3.11 fails to make a tree if another thread makes one in between."""
    interval = sys.getswitchinterval()
    kernels = [triton.jit(add) for _ in range(400)]
    let_others = lambda *_: time.sleep(0)  # noqa: E731
    trees = []
    gc.callbacks.append(let_others)
    sys.setswitchinterval(1e-6)
    try:
        in_threads(lambda i: trees.extend(kernel.parse() for kernel in kernels[i::8]), 8)
    finally:
        sys.setswitchinterval(interval)
        gc.callbacks.remove(let_others)
    assert [tree.body[0].name for tree in trees] == ["add"] * 400


def test_a_model_of_kernels_is_used_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scaled = tmp_path / "mine", tmp_path / "scaled"
    shutil.copytree(prior.shipped_models("kernels-")["h200-sxm"], folder)
    shutil.copytree(prior.shipped_models("scaled-")["h200-sxm"], scaled)
    monkeypatch.setattr(prior, "shipped_models", lambda kind: {})
    prior._load.cache_clear()
    try:
        mine = costmodel.use(folder)
        assert mine is not None
        assert prior.model_for(90) is mine
        assert prior.model_for(80) is None, "it is for another architecture"
        assert prior.model_for(90, "scaled") is None
        other = costmodel.use(str(scaled))
        assert prior.model_for(90, "scaled") is other
        assert prior.model_for(90, "after") is mine
        again = costmodel.use(folder)  # trained once more, say
        assert again is not mine
        assert prior.model_for(90) is again
        card = folder / "card.json"
        card.write_text(card.read_text().replace('"kernel_model":', '"kernel_model": 99', 1))
        with pytest.raises(CostModelError):
            costmodel.use(folder)
        assert prior.model_for(90) is again
        assert costmodel.use(None) is None
        assert prior.model_for(90) is None
    finally:
        costmodel.use(None)
        prior._load.cache_clear()
