"""Any kernel is compiled elsewhere, from a text, and found in Triton's cache by its own launch."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fake_driver import FakeDriver, fake_driver
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import num_warps as num_warps_here
from triton.runtime.cache import FileCacheManager
from triton.tools.tensor_descriptor import TensorDescriptor

from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.compile.triton_private import cache_folder
from costmodel.compile.ttir import Compilation, FrontEnd, KernelJob, compile_job, recorded
from costmodel.errors import CompileError, HostError

ROOT = Path(__file__).resolve().parent.parent
HALF = tl.constexpr(0.5)


@triton.jit
def scaled(x):  # type: ignore[no-untyped-def]
    return x * HALF


@triton.jit  # type: ignore[untyped-decorator]
def plain(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, scaled(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def product(a_ptr, b_ptr, c_ptr, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at, ks = tl.arange(0, BLOCK), tl.arange(0, 32)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, 32):
        a = tl.load(a_ptr + at[:, None] * k + (start + ks)[None, :])
        b = tl.load(b_ptr + (start + ks)[:, None] * BLOCK + at[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + at[:, None] * BLOCK + at[None, :], total.to(tl.float16))


@triton.jit  # type: ignore[untyped-decorator]
def choosy(x_ptr, bias_ptr, shape, KIND: tl.constexpr, F: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = F(tl.load(x_ptr + at, mask=at < shape[0])).to(KIND)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at)
    tl.store(x_ptr + at, x, mask=at < shape[1])


@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def heuristic(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x_ptr + at, 1.0)
    else:
        tl.store(x_ptr + at, 2.0, mask=at < n)


def closure() -> Any:
    step = tl.constexpr(3)

    @triton.jit  # type: ignore[untyped-decorator]
    def enclosed(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + step * tl.arange(0, BLOCK), 1.0)

    return enclosed


@triton.jit  # type: ignore[untyped-decorator]
def described(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x.store([0, 0], x.load([0, BLOCK]) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def warped(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, BLOCK), num_warps_here())


@triton.jit  # type: ignore[untyped-decorator]
def refused(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(BLOCK > 64, "blocks of more than 64 only")
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@gluon.jit  # type: ignore[untyped-decorator]
def laid_out(x_ptr, BLOCK: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(x_ptr + at, 2 * gl.load(x_ptr + at))


def floats(count: int = 4096) -> torch.Tensor:
    return torch.zeros(count)


def halves(count: int = 64 * 64) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float16)


Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "globals": lambda **kw: plain.run(floats(), 1000, BLOCK=128, num_warps=2, **kw),
    "heuristics": lambda **kw: heuristic.run(floats(), 1000, BLOCK=128, **kw),
    "closure": lambda **kw: closure().run(floats(), BLOCK=64, **kw),
    "dot": lambda **kw: product.run(
        halves(), halves(), halves(), 64, BLOCK=64, num_warps=4, num_stages=4, **kw
    ),
    "registers": lambda **kw: plain.run(floats(), 999, BLOCK=1024, maxnreg=32, **kw),
    "dtype, function, None, tuple": lambda **kw: choosy.run(
        halves(), None, (100, 50), KIND=tl.float32, F=scaled, **kw
    ),
    "unaligned": lambda **kw: plain.run(floats()[1:], 1000, BLOCK=256, **kw),
    "descriptor": lambda **kw: described.run(
        TensorDescriptor.from_tensor(halves().view(64, 64), [32, 32]), BLOCK=32, **kw
    ),
    "warps in the front end": lambda **kw: warped.run(floats(), BLOCK=64, num_warps=8, **kw),
    "gluon": lambda **kw: laid_out.run(floats(), BLOCK=256, WARPS=2, num_warps=2, **kw),
}  # fmt: skip


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for kernel in (plain, product, choosy, heuristic.fn, described, warped, refused, laid_out):
        kernel.device_caches.clear()  # what it compiled in other tests
    with fake_driver() as fake:
        yield fake


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(1) as pool:
        yield pool


def compilation(call: Call) -> Compilation:
    found, value = recorded(lambda: call(grid=(8,), warmup=True))
    assert value is None
    assert len(found) == 1
    return found[0]


def submit(pool: CompilePool, job: KernelJob) -> Artifact:
    compile_ = functools.partial(compile_job, job, "spec")
    return pool.submit(job.identity, "spec", compile_, cache=Path(knobs.cache.dir)).result()


def launch(call: Call) -> tuple[Any, list[bool]]:
    """Return the kernel that was launched, and of each look-up if Triton's cache had it."""
    hits: list[bool] = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
        return call(grid=(8,), warmup=False), hits


# --- recording ------------------------------------------------------------------------------------


def test_a_recorded_call_neither_compiles_nor_launches(driver: FakeDriver, tmp_path: Path) -> None:
    found = compilation(CALLS["globals"])
    assert found.function is plain
    assert found.signature == {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    assert found.options.num_warps == 2
    assert driver.launches == []
    assert not (tmp_path / "triton").exists()


def test_every_kernel_of_a_call_is_recorded_and_an_error_ends_it() -> None:
    def call() -> None:
        plain.run(floats(), 5, BLOCK=32, grid=(1,), warmup=True)
        warped.run(floats(), BLOCK=32, grid=(1,), warmup=True)

    assert [x.function for x in recorded(call)[0]] == [plain, warped]
    with pytest.raises(TypeError, match="BLOCK"):
        recorded(lambda: plain.run(floats(), 5, grid=(1,), warmup=True))


def test_what_is_compiled_is_returned_and_later_calls_compile_as_ever(driver: FakeDriver) -> None:
    kernel, _ = launch(CALLS["globals"])
    found, value = recorded(lambda: CALLS["globals"](grid=(8,), warmup=True))
    assert (found, value) == ([], kernel)
    assert [name for name, *_ in driver.launches] == ["plain"]


def test_other_threads_compile_while_one_records() -> None:
    kernels: list[Any] = []

    def call() -> None:
        def launch_there() -> None:
            kernels.append(CALLS["globals"](grid=(8,), warmup=True))

        thread = threading.Thread(target=launch_there)
        thread.start()
        thread.join()

    found, _ = recorded(call)
    assert found == []
    assert kernels[0].asm["ptx"]


# --- front end ------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of which the front end made IR."""
    from triton.compiler import code_generator

    names: list[str] = []
    own = code_generator.ast_to_ttir

    def ast_to_ttir(fn: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(fn.__name__)
        return own(fn, *args, **kwargs)

    monkeypatch.setattr(code_generator, "ast_to_ttir", ast_to_ttir)
    return names


def jobs_of(kernel: Any, *args: Any, configs: list[dict[str, Any]]) -> list[KernelJob]:
    front = FrontEnd()
    return [
        front.job(compilation(lambda c=config, **kw: kernel.run(*args, **c, **kw)))
        for config in configs
    ]


def test_one_text_serves_all_warps_stages_and_registers(made: list[str]) -> None:
    configs = [
        {"BLOCK": block, "num_warps": warps, "num_stages": stages, "maxnreg": registers}
        for block in (64, 128)
        for warps in (2, 4)
        for stages in (2, 3)
        for registers in (None, 64)
    ]
    jobs = jobs_of(plain, floats(), 1000, configs=configs)
    assert made == ["plain", "plain"]
    assert len({job.text for job in jobs}) == 2
    assert len({job.key for job in jobs}) == len(configs)


@pytest.mark.fault("B41")
def test_texts_do_not_pile_up(made: list[str]) -> None:
    front = FrontEnd(kept=2)
    for block in (32, 64, 32, 128, 32):
        front.job(compilation(lambda b=block, **kw: plain.run(floats(), 1000, BLOCK=b, **kw)))
    assert len(made) == 4


@pytest.mark.parametrize("kernel", [warped, laid_out], ids=["warps read", "gluon"])
def test_what_looks_at_its_warps_has_a_text_for_each(kernel: Any) -> None:
    more = {"WARPS": 4} if kernel is laid_out else {}
    configs = [{"BLOCK": 256, "num_warps": warps, **more} for warps in (4, 4)]
    first, again = jobs_of(kernel, floats(), configs=configs)
    assert first == again
    found = [{"BLOCK": 256, "num_warps": n, **({"WARPS": n} if more else {})} for n in (4, 8, 4)]
    assert len({job.text for job in jobs_of(kernel, floats(), configs=found)}) == 2


def test_what_the_signature_tells_apart_has_keys_of_its_own() -> None:
    aligned, unaligned = (
        FrontEnd().job(compilation(lambda x=x, **kw: plain.run(x, 1000, BLOCK=64, **kw)))
        for x in (floats(), floats()[1:])
    )
    assert aligned.key != unaligned.key
    assert "x_ptr: !tt.ptr<f32> {tt.divisibility = 16" in aligned.text
    assert "x_ptr: !tt.ptr<f32> {tt.divisibility = 16" not in unaligned.text


@pytest.mark.parametrize("name", [*CALLS])
def test_jobs_are_plain_data(name: str) -> None:
    job = FrontEnd().job(compilation(CALLS[name]))
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_kernel_that_the_front_end_refuses_fails_with_its_reason() -> None:
    front = FrontEnd()
    with pytest.raises(CompileError, match=r"refused .*blocks of more than 64 only"):
        front.job(compilation(lambda **kw: refused.run(floats(), BLOCK=32, **kw)))
    assert front.job(compilation(lambda **kw: refused.run(floats(), BLOCK=128, **kw))).text


def test_a_hook_that_children_lack_is_not_passed_over() -> None:
    found = compilation(CALLS["globals"])
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = lambda *_: None
        with pytest.raises(HostError, match="a hook in this process"):
            FrontEnd().job(found)
    with knobs.compilation.scope():
        knobs.compilation.instrumentation_mode = "default"  # as Proton sets it
        profiled = compilation(CALLS["globals"])
    with pytest.raises(HostError, match="Proton"):
        FrontEnd().job(profiled)


def test_many_threads_make_the_same_jobs(made: list[str]) -> None:
    front, found = FrontEnd(), compilation(CALLS["dot"])
    jobs: list[KernelJob] = []
    threads = [threading.Thread(target=lambda: jobs.append(front.job(found))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert jobs == jobs[:1] * 4
    assert made == ["product"]


# --- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CALLS])
def test_the_launch_finds_what_a_child_compiled(
    name: str, pool: CompilePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = CALLS[name]
    found = compilation(call)
    artifact = submit(pool, job := FrontEnd().job(found))
    assert (artifact.status, artifact.error) == ("ok", "")
    kernel, hits = launch(call)
    assert hits == [True]
    assert kernel.hash == job.key == artifact.key
    # Triton's own way, from the kernel itself.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    found.function.device_caches.clear()
    own, hits = launch(call)
    assert hits == [False]
    assert own.asm["ptx"] == kernel.asm["ptx"]
    assert own.metadata == kernel.metadata


class OwnManager(FileCacheManager):  # type: ignore[misc]
    """Has a folder for each process, as servers have."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self.cache_dir = os.path.join(f"{knobs.cache.dir}_{os.getpid()}", key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


def test_the_folder_of_another_cache_manager_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "no_module_of_the_child:OwnManager")
    with knobs.cache.scope(), CompilePool(1) as pool:
        knobs.cache.manager_class = OwnManager
        job = FrontEnd().job(compilation(CALLS["globals"]))
        compile_ = functools.partial(compile_job, job, "spec")
        assert pool.submit(job.identity, "spec", compile_, cache=cache_folder()).result().ok
        assert launch(CALLS["globals"])[1] == [True]


def test_clusters_are_found_too(pool: CompilePool) -> None:
    """Of these Triton itself does not always make the same PTX."""
    call = functools.partial(
        product.run, halves(), halves(), halves(), 64, BLOCK=64, num_warps=4, num_ctas=2
    )
    assert submit(pool, FrontEnd().job(compilation(call))).ok
    assert launch(call)[1] == [True]


def test_a_binary_that_cannot_be_made_is_an_artifact_with_its_reason(pool: CompilePool) -> None:
    job = FrontEnd().job(compilation(CALLS["dot"]))
    few = replace(job, options={**job.options, "ptx_options": "--no-such-option"})
    artifact = submit(pool, few)
    assert artifact.status == "compile_error"
    assert "no-such-option" in artifact.error
    artifact = submit(pool, replace(job, text="no text of any kernel", source_hash="another"))
    assert artifact.status == "crashed"
    assert artifact.error


def test_a_setting_that_says_the_default_costs_no_hit(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "0")
    assert submit(pool, FrontEnd().job(compilation(CALLS["globals"]))).ok
    assert launch(CALLS["globals"])[1] == [True]


def test_settings_reach_the_child(pool: CompilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["dot"]
    optimized = submit(pool, FrontEnd().job(compilation(call)))
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    slow = submit(pool, FrontEnd().job(compilation(call)))
    assert optimized.key != slow.key
    assert (optimized.registers, optimized.spill_bytes) != (slow.registers, slow.spill_bytes)
    kernel, hits = launch(call)
    assert (kernel.hash, hits) == (slow.key, [True])


def test_an_override_is_compiled_anew_when_its_file_changes(
    pool: CompilePool, tmp_path: Path
) -> None:
    original, _ = launch(lambda **kw: CALLS["globals"](**kw))
    file = tmp_path / "mine.ptx"

    def call(**kw: Any) -> Any:
        return plain.run(floats(), 1000, BLOCK=128, num_warps=2, ir_override=str(file), **kw)

    with pytest.raises(CompileError, match=r"mine\.ptx"):
        FrontEnd().job(compilation(call))
    jobs, texts = [], []
    for comment in ("// one\n", "// two\n"):
        file.write_text(original.asm["ptx"] + comment)
        plain.device_caches.clear()
        jobs.append(FrontEnd().job(compilation(call)))
        assert submit(pool, jobs[-1]).ok
        kernel, hits = launch(call)
        assert hits == [True]
        texts.append(kernel.asm["ptx"])
    assert [text[-7:] for text in texts] == ["// one\n", "// two\n"]
    assert jobs[0].key == jobs[1].key
    assert jobs[0].identity != jobs[1].identity


def test_features_are_there_though_triton_keeps_binaries_only(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    launch(CALLS["globals"])
    plain.device_caches.clear()
    artifact = submit(pool, FrontEnd().job(compilation(CALLS["globals"])))
    assert artifact.ok
    assert artifact.ptx["all_st_global"] > 0


PROGRAM = """
import functools
from pathlib import Path
import torch, triton, triton.language as tl
from triton import knobs
from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.ttir import FrontEnd, compile_job, recorded
from fake_driver import fake_driver

print("runs once")

@triton.jit
def of_main(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

hits = []
knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
with fake_driver(), CompilePool(1) as pool:
    call = functools.partial(of_main.run, torch.zeros(64), BLOCK=64, grid=(1,))
    job = FrontEnd().job(recorded(lambda: call(warmup=True))[0][0])
    work = functools.partial(compile_job, job)
    print(pool.submit(job.key, 0, work, cache=Path(knobs.cache.dir)).result().status)
    call(warmup=False)
print(hits)
"""


@pytest.mark.slow
def test_a_kernel_of_the_program_itself_needs_no_import_of_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["runs once", "ok", "[True]", ""], done.stderr
