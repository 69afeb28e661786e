"""Scaled products: what is refused, what compiles where, and that the tuner keeps the choice."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
from autotune_fakes import Machine, machine_without_gpu
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType, SwizzleType
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import costmodel
import costmodel.scaled.launch as scaled_launch
from costmodel.autotune.tuner import state_of
from costmodel.compile.ttir import compile_job, front_end, recorded
from costmodel.errors import (
    CompileError,
    CostModelError,
    DeviceError,
    GradientError,
    InvalidInput,
    LayoutError,
    ShapeError,
    UnsupportedDtype,
)
from costmodel.hardware.target import Target
from costmodel.kernels.scaled import scaled_tiles
from costmodel.kernels.scaled_hopper import scaled_warp_specialized
from costmodel.scaled import layouts
from costmodel.scaled.configs import prune
from costmodel.scaled.launch import Kernels, repeated, tuned
from costmodel.scaled.product import int_call, scaled_call

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
TENSOR, ROW = ScalingType.TensorWise, ScalingType.RowWise
BY_ROW, BY_BLOCK = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
M, N, K = 6, 256, 384


def matrix(rows: int, cols: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(rows, cols).to(dtype)


def arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of a product with scales of rows, some of them changed."""
    return {
        "mat_a": matrix(M, K), "mat_b": matrix(N, K).T,
        "scale_a": torch.ones(M, 1), "scale_recipe_a": ROW,
        "scale_b": torch.ones(1, N), "scale_recipe_b": ROW, **changed,
    }  # fmt: skip


def by_blocks(**changed: Any) -> dict[str, Any]:
    """Arguments of a product with scales of blocks, some of them changed."""
    blocks = {
        "scale_a": torch.ones(3, M).T, "scale_recipe_a": BY_ROW,
        "scale_b": torch.ones(N // 128, 4).T, "scale_recipe_b": BY_BLOCK,
    }  # fmt: skip
    return arguments(**(blocks | changed))


# --- What is refused ------------------------------------------------------------------------------

REFUSED = [
    ({"mat_a": matrix(K, M).T}, LayoutError, "row-major"),
    ({"mat_b": matrix(K, N)}, LayoutError, "column-major"),
    ({"mat_a": matrix(M, K)[0]}, ShapeError, "matrix"),
    ({"mat_a": matrix(M, K - 16)}, ShapeError, "k"),
    ({"mat_a": torch.zeros(M, K)}, UnsupportedDtype, "float8_e4m3fn"),
    ({"mat_b": matrix(N, K, INT8).T}, UnsupportedDtype, "both"),
    ({"mat_a": None}, InvalidInput, "tensor"),
    ({"scale_a": torch.ones(M)}, ShapeError, r"\[6, 1\]"),
    ({"scale_b": torch.ones(N, 1)}, ShapeError, r"\[1, 256\]"),
    ({"scale_a": torch.ones(M, 1).double()}, UnsupportedDtype, "float32"),
    ({"scale_a": [torch.ones(M, 1)] * 2}, InvalidInput, "scale_a"),
    ({"scale_recipe_a": ScalingType.BlockWise1x32}, InvalidInput, "RowWise"),
    ({"scale_recipe_a": "rows"}, InvalidInput, "RowWise"),
    ({"scale_recipe_b": BY_BLOCK}, InvalidInput, "both operands"),
    ({"scale_recipe_a": TENSOR}, ShapeError, "TensorWise"),
    ({"swizzle_a": 1}, InvalidInput, "swizzle_a"),
    ({"swizzle_b": [SwizzleType.SWIZZLE_32_4_4]}, InvalidInput, "swizzle_b"),
    ({"swizzle_b": [0, 0]}, InvalidInput, "swizzle_b"),
    ({"contraction_dim": (1, 0)}, InvalidInput, "contraction_dim"),
    ({"bias": torch.zeros(N + 1)}, InvalidInput, "bias"),
    ({"bias": torch.zeros(2 * N)[::2]}, InvalidInput, "contiguous"),
    ({"bias": torch.zeros(N, dtype=torch.int32)}, InvalidInput, "float"),
    ({"bias": torch.zeros(N, requires_grad=True)}, GradientError, "no_grad"),
    ({"output_dtype": torch.float64}, UnsupportedDtype, "bfloat16"),
    ({"activation": "tanh"}, InvalidInput, "relu"),
    ({"out": torch.zeros(M, N)}, ShapeError, "bfloat16"),
    ({"out": torch.zeros(N, M, dtype=torch.bfloat16).T}, LayoutError, "row-major"),
]


@pytest.mark.parametrize(("changed", "kind", "text"), REFUSED)
def test_what_is_wrong_is_named(changed: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        costmodel.scaled_mm(**arguments(**changed))


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "scale_a", "scale_b", "bias", "out"])
def test_no_gradient_is_lost_in_silence(name: str) -> None:
    given = arguments(bias=torch.zeros(N), out=torch.zeros(M, N).bfloat16())
    given[name] = given[name].float().requires_grad_().to(given[name].dtype)
    with pytest.raises(GradientError, match=f"{name} requires grad"):
        costmodel.scaled_mm(**given)
    with torch.no_grad(), pytest.raises(DeviceError):  # nothing else is wrong
        costmodel.scaled_mm(**given)


@pytest.mark.parametrize("left_out", [None, 0, (), [], SwizzleType.NO_SWIZZLE])
def test_lists_of_one_are_taken_as_torch_takes_them(left_out: Any) -> None:
    given = arguments(swizzle_a=left_out, swizzle_b=left_out)
    in_lists = given | {k: [x] for k, x in given.items() if k.startswith(("scale", "swizzle"))}
    for each in (given, in_lists):
        with pytest.raises(DeviceError):  # all else was taken
            costmodel.scaled_mm(**each)


def test_operands_on_a_cpu_are_refused_last() -> None:
    with pytest.raises(DeviceError, match="GPU"):
        costmodel.scaled_mm(**arguments())
    with pytest.raises(DeviceError, match="GPU"):
        costmodel.int_mm(matrix(M, K, INT8), matrix(N, K, INT8).T)


def test_int8_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(UnsupportedDtype, match="int8"):
        costmodel.int_mm(matrix(M, K), matrix(N, K).T)
    with pytest.raises(UnsupportedDtype, match="RowWise"):
        costmodel.scaled_mm(**by_blocks(mat_a=matrix(M, K, INT8), mat_b=matrix(N, K, INT8).T))


@given(
    rows=st.integers(0, 4), cols=st.integers(0, 4), strides=st.sampled_from([(1, 4), (4, 1)]),
    recipes=st.tuples(*[st.sampled_from([TENSOR, ROW, BY_ROW, BY_BLOCK])] * 2),
)  # fmt: skip
def test_any_scales_are_taken_or_refused_with_a_reason(
    rows: int, cols: int, strides: tuple[int, int], recipes: tuple[Any, Any]
) -> None:
    scale = torch.ones(64).as_strided((rows, cols), strides)
    given = matrix(M, K), matrix(N, K).T, scale, recipes[0], scale, recipes[1]
    if recipes == (TENSOR, TENSOR) and scale.numel() == 1:
        assert scaled_call(*given)[6:9] == (M, N, K)
    else:  # no other shape serves the rows of both
        with pytest.raises(CostModelError, match="expected"):
            scaled_call(*given)


def test_other_packages_blocks_are_named() -> None:
    with pytest.raises(InvalidInput, match="128"):
        layouts.w8a8_triton_block_scaled_mm(
            matrix(M, K), matrix(N, K), torch.ones(M, 6), torch.ones(4, 6), [64, 64]
        )


# --- What compiles, and what is chosen ------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for kernel in (scaled_tiles, scaled_warp_specialized):
        kernel.device_caches.clear()  # of another machine
    with machine_without_gpu(tmp_path / "kernels") as machine:
        machine.us = lambda launch: 1.0 + launch.options["num_stages"]
        yield machine
        tuned.__dict__.pop("_costmodel", None)  # what it knows of this machine
        tuned.cache.clear()


def call_of(form: str, m: int = M) -> tuple[Any, ...]:
    if form == "int32":
        return int_call(matrix(m, K, INT8), matrix(N, K, INT8).T)
    dtype = INT8 if form == "int8" else E4M3
    given = arguments(mat_a=matrix(m, K, dtype), mat_b=matrix(N, K, dtype).T)
    given |= {"scale_a": torch.ones(m, 1)}
    if form == "block":
        given = by_blocks(mat_a=matrix(m, K), scale_a=torch.ones(3, m).T)
    return scaled_call(*given.values(), fast=form == "fast")


def configurations(call: tuple[Any, ...]) -> list[Any]:
    return prune(tuned.configs, dict(zip(Kernels.arg_names, call, strict=True)))


def test_buckets_end_at_powers_of_two_and_three_quarters_of_them() -> None:
    at = Kernels.arg_names.index("bucket")
    found = {m: call_of("row", m)[at] for m in (1, 2, 3, 48, 64, 65, 96, 97, 128, 129, 200)}
    assert found == {1: 1, 2: 2, 3: 4, 48: 64, 64: 64, 65: 96, 96: 96, 97: 128, 128: 128,
                     129: 192, 200: 256}  # fmt: skip


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (4608, 3584), (7168, 16384), (512, 7168)])
def test_small_products_keep_every_multiprocessor_busy(machine: Machine, n: int, k: int) -> None:
    for m in (1, 16, 64, 128):
        given = arguments(mat_a=matrix(m, k), mat_b=matrix(n, k).T)
        given |= {"scale_a": torch.ones(m, 1), "scale_b": torch.ones(1, n)}
        programs = []
        for config in configurations(scaled_call(*given.values())):
            c = config.kwargs
            if "splits" in c:
                tiles = -(-m // c["block_m"]) * -(-n // c["block_n"])
                programs.append(tiles * c["splits"])
                assert c["splits"] * 2 <= k / c["step"]  # each split has two steps
        assert max(programs) >= 100
        assert max(programs) <= 4 * machine.target.device.sm_count


@pytest.mark.slow
@pytest.mark.parametrize("form", ["row", "fast", "block", "int8", "int32"])
def test_every_kernel_compiles_for_hopper(machine: Machine, form: str) -> None:
    jobs = {}
    for m in (6, 100, 2000):
        for config in configurations(call_of(form, m)):
            if config.kwargs["kernel"] != "torch":
                options = {"warmup": True, **config.all_kwargs()}
                found, _ = recorded(lambda m=m, o=options: Kernels().run(*call_of(form, m), **o))  # type: ignore[misc]
                job = front_end().job(found[-1])
                jobs[job.identity] = job, config
    assert {config.kwargs["kernel"] for _, config in jobs.values()} == {"pointer", "tma", "warps"}
    largest = machine.target.device.shared_bytes
    for job, config in [*jobs.values()][::2]:
        artifact = compile_job(job, job.name)
        assert artifact.ok, f"{config}: {artifact.error}"
        assert artifact.shared_bytes <= largest, config
        assert artifact.ptx["all_wgmma"] > 0, config


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [(ROW, ROW), (BY_ROW, BY_BLOCK), (BY_ROW, BY_ROW)])
def test_no_sum_that_is_promoted_leaves_the_registers(machine: Machine, recipes: Any) -> None:
    m = 512
    if recipes[0] == ROW:
        call = call_of("row", m)
    else:
        scale_b = torch.ones(N // 128, 4).T if recipes[1] == BY_BLOCK else torch.ones(3, N).T
        call = scaled_call(matrix(m, K), matrix(N, K).T, torch.ones(3, m).T, BY_ROW, scale_b,
                           recipes[1])  # fmt: skip
    options = [c.all_kwargs() for c in configurations(call) if c.kwargs["kernel"] == "warps"]
    assert len(options) >= 2
    for each in options:
        found, _ = recorded(lambda o=each: Kernels().run(*call, **{"warmup": True} | o))  # type: ignore[misc]
        job = front_end().job(found[-1])
        artifact = compile_job(job, job.name)
        assert artifact.ok, f"{each}: {artifact.error}"
        assert artifact.spill_bytes == 0, each


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "form"), [(89, "row"), (89, "block"), (80, "int8"), (89, "int8")])
def test_tiles_compile_for_older_architectures(machine: Machine, arch: int, form: str) -> None:
    machine.target = Target.named("a100-sxm")  # which has no TMA
    found = configurations(call_of(form))
    assert {config.kwargs["kernel"] for config in found} <= {"pointer", "torch"}
    config = next(c for c in found if c.kwargs["kernel"] == "pointer")
    options = {"warmup": True, **config.all_kwargs()}
    (made, *_), _ = recorded(lambda: Kernels().run(*call_of(form), **options))
    source = ASTSource(made.function, made.signature, made.constexprs, made.attrs)
    wanted = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=wanted)
    assert binary.metadata.shared <= 99 * 1024
    assert ("e4m3.e4m3" if form != "int8" else "s8.s8") in binary.asm["ptx"]


def test_the_choice_is_kept_and_shared_by_a_bucket(machine: Machine) -> None:
    for _ in range(2):
        tuned.run(*call_of("block", 5), warmup=False)
    chosen, launches = tuned.best_config, len(machine.launches)
    assert launches > 20
    tuned.run(*call_of("block", 7), warmup=False)  # both up to 8
    assert len(machine.launches) == launches + 1
    tuned.run(*call_of("block", 8), warmup=False)  # here torch's block scales may fit
    assert len(machine.launches) > launches + 2
    tuned.run(*call_of("block", 5), warmup=False)
    assert tuned.best_config == chosen
    machine.restart()
    tuned.__dict__.pop("_costmodel")
    tuned.cache.clear()
    tuned.run(*call_of("block", 5), warmup=False)
    assert len(machine.launches) == 1
    assert tuned.best_config == chosen


@pytest.mark.parametrize("mode", ["predict", "never", "background"])
def test_every_mode_launches_a_kernel(machine: Machine, mode: str) -> None:
    costmodel.set_mode(mode)
    try:
        tuned.run(*call_of("block", 16), warmup=False)
    finally:
        costmodel.set_mode("auto")
    assert machine.launches
    assert tuned.best_config.kwargs["kernel"] != "torch"


def test_what_torch_refuses_is_no_candidate(machine: Machine) -> None:
    tuned.run(*call_of("row", 16), warmup=False)
    kernels = [c.kwargs["kernel"] for c in tuned.configs_timings]
    assert "torch" in kernels
    tuned.run(*call_of("block", 1), warmup=False)
    kernels = [c.kwargs["kernel"] for c in tuned.configs_timings]
    assert "torch" not in kernels
    with pytest.raises(CompileError, match="torch does not compute this"):
        Kernels().run(*call_of("block", 16), kernel="torch")  # of blocks, on a CPU


@pytest.mark.parametrize("m", [32, 100])
@pytest.mark.parametrize("form", ["row", "block", "int32"])
def test_calls_that_share_a_choice_can_all_be_computed_by_it(
    machine: Machine, form: str, m: int
) -> None:
    """Torch refuses other strides than its own, or does not look at them and reads elsewhere."""
    dtype = INT8 if form == "int32" else E4M3
    found: dict[Any, set[str]] = {}
    for of_a, of_out, of_scale, rows in itertools.product((0, 4, 16), (0, 4, 8), (0, 4), (3, 4)):
        a, b = matrix(m, K + of_a, dtype)[:, :K], matrix(N, K, dtype).T
        out = torch.zeros(m, N + of_out, dtype=torch.int32 if form == "int32" else torch.bfloat16)
        out = out[:, :N]
        scale_a = torch.ones(m, 1 + of_scale)[:, :1]
        scale_b = torch.ones(N, rows - 2).T[:1]
        if form == "int32":
            call, odd = int_call(a, b, out), False
        elif form == "row":
            call = scaled_call(a, b, scale_a, ROW, scale_b, ROW, out=out)
            odd = of_scale > 0 or rows > 3
        else:
            scale_a, scale_b = torch.ones(3, m + of_scale).T[:m], torch.ones(N // 128, rows).T
            call = scaled_call(a, b, scale_a, BY_ROW, scale_b, BY_BLOCK, out=out)
            odd = of_scale > 0 or rows < 4
        kernels = {str(config) for config in configurations(call)}
        key = state_of(tuned).key_of(call, {})
        assert found.setdefault(key, kernels) == kernels, key
        odd |= of_a % 16 > 0 or of_out > 0
        assert any("torch" in kernel for kernel in kernels) != odd


def test_deep_gemm_is_a_candidate_where_it_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "deep_gemm" not in {c.kwargs["kernel"] for c in configurations(call_of("block"))}
    calls = []

    def fp8_gemm_nt(a: Any, b: Any, d: torch.Tensor) -> None:
        calls.append((a[0].shape, a[1].shape, b[0].shape, b[1].shape, d.shape))
        machine.now_us += 0.5  # the fastest
        if len(d) == 2:
            raise AssertionError("no such layout")

    module = ModuleType("deep_gemm")
    module.__spec__ = ModuleSpec("deep_gemm", None)
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    tuned.run(*call_of("block", 5), warmup=False)
    assert tuned.best_config.kwargs["kernel"] == "deep_gemm"
    assert set(calls) == {((5, K), (5, 3), (N, K), (2, 3), (5, N))}
    tuned.run(*call_of("block", 2), warmup=False)
    assert tuned.best_config.kwargs["kernel"] != "deep_gemm"
    assert "deep_gemm" not in {c.kwargs["kernel"] for c in configurations(call_of("row"))}


class Gpu(str):
    """A name that torch takes for that of the CPU."""

    type = "cuda"


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return Gpu("cpu")

    def get_device(self) -> int:
        return 0


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    return given | {name: x.as_subclass(OnGpu) for name, x in tensors.items()}


@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose tensors say that they are on its GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    workspace = SimpleNamespace(get=lambda *sizes: (torch.zeros(4), torch.zeros(4)))
    monkeypatch.setattr(scaled_launch, "workspace_of", lambda index, stream: workspace)
    return machine


def described(launch: Any) -> Any:
    """Everything of a launch except where its scratch memory lies."""
    named = {
        name: (value.base.data_ptr(), value.shape, value.strides, value.block_shape)
        if name.endswith("_desc") and value is not None else value.data_ptr()
        if isinstance(value, torch.Tensor) else value
        for name, value in launch.named.items() if name not in ("partial_ptr", "arrivals_ptr")
    }  # fmt: skip
    return launch.grid, named


@pytest.mark.parametrize("kernel", ["pointer", "tma", "warps"])
@pytest.mark.parametrize("make", [arguments, by_blocks])
def test_a_call_of_a_known_kind_launches_what_a_first_call_would(
    gpu: Machine, kernel: str, make: Any
) -> None:
    """It takes less of the host than binding and checking all arguments anew."""
    m = 100
    gpu.us = lambda launch: 1.0 + (launched_by(launch) != kernel)

    def launched_by(launch: Any) -> str:
        if "a_ptr" not in launch.named:
            return "warps"
        return "pointer" if launch.named["a_desc"] is None else "tma"

    def call(fill: float) -> torch.Tensor:
        given = make(mat_a=torch.full((m, K), fill).to(E4M3), bias=torch.zeros(N))
        scale = torch.ones(m, 2)[:, :1] if make is arguments else torch.ones(3, m).T
        held.append(given := on_gpu(given | {"scale_a": scale, "activation": "relu"}))
        return costmodel.scaled_mm(**given)

    held: list[dict[str, Any]] = []
    first = call(1.0)
    launches = len(gpu.launches)
    assert launched_by(gpu.launches[-1]) == kernel
    assert launches > 5
    again = call(2.0)
    assert len(gpu.launches) == launches + 1
    assert (again.shape, again.dtype) == (first.shape, first.dtype)
    assert again.data_ptr() != first.data_ptr()
    found = described(gpu.launches[-1])
    state_of(tuned).repeats.clear()
    expected = costmodel.scaled_mm(**held[-1], out=again)
    assert expected is again
    assert found == described(gpu.launches[-1])


CHANGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mat_a": matrix(K, M).T}, LayoutError, "row-major"),
    ({"mat_b": matrix(N, K)}, ShapeError, "k"),
    ({"scale_a": torch.ones(M)}, ShapeError, r"\[6, 1\]"),
    ({"scale_a": torch.ones(M, 1, requires_grad=True)}, GradientError, "no_grad"),
    ({"scale_a": [torch.ones(M, 1)] * 2}, InvalidInput, "scale_a"),
    ({"scale_recipe_a": TENSOR}, ShapeError, "TensorWise"),
    ({"scale_recipe_a": [ROW, ROW]}, InvalidInput, "RowWise"),
    ({"output_dtype": torch.float64}, UnsupportedDtype, "bfloat16"),
    ({"out": torch.zeros(M, N)}, ShapeError, "bfloat16"),
    ({"mat_a": matrix(M, K)}, DeviceError, "mat_a"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "text"), CHANGED)
def test_a_known_call_that_goes_wrong_is_checked_again(
    gpu: Machine, changed: dict[str, Any], kind: type[Exception], text: str
) -> None:
    given = on_gpu(arguments())
    costmodel.scaled_mm(**given)
    launches = len(gpu.launches)
    own = changed if kind is DeviceError else on_gpu(changed)
    with pytest.raises(kind, match=text):
        costmodel.scaled_mm(**(given | own))
    assert len(gpu.launches) == launches


def test_other_scales_strides_and_types_are_other_calls(gpu: Machine) -> None:
    """A scale that the first call shares between its operands is not shared by the next."""
    one, two = (torch.ones(1).as_subclass(OnGpu) for _ in range(2))
    a = matrix(M, K + 8)[:, :K]  # such rows are not torch's, which would take no time here
    given = on_gpu(arguments(mat_a=a, scale_recipe_a=TENSOR, scale_recipe_b=TENSOR))
    for scales in ((one, one), (one, two), (two, one)):
        named = dict(zip(("scale_a", "scale_b"), scales, strict=True))
        costmodel.scaled_mm(**(given | named))
        found = gpu.launches[-1].named
        assert (found["scale_a_ptr"], found["scale_b_ptr"]) == scales
    wide = matrix(M, K + 24)[:, :K].as_subclass(OnGpu)
    costmodel.scaled_mm(**(given | {"scale_a": one, "scale_b": one, "mat_a": wide}))
    assert gpu.launches[-1].named["stride_am"] == K + 24
    out = costmodel.scaled_mm(
        **(given | {"scale_a": one, "scale_b": one, "output_dtype": torch.float32})
    )
    assert out.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["pointer", "tma", "warps"])
def test_what_is_repeated_keeps_no_tensor_alive(gpu: Machine, kernel: str) -> None:
    """Else each m that is called would keep its operands and its result."""
    call = call_of("row", 100)
    options = next(
        c.all_kwargs() for c in configurations(call)[::-1] if c.kwargs["kernel"] == kernel
    )
    again = repeated(call, loaded=Kernels().run(*call, **options), **options)
    gpu.launches.clear()
    alive = [weakref.ref(x) for x in call[:6] if x is not None]
    del call
    gc.collect()
    assert [x() for x in alive if x() is not None] == []
    again(call_of("row", 100)[:6])
    assert len(gpu.launches) == 1


def test_the_choice_of_another_thread_is_not_launched_as_this_ones_binary(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while this thread still launches a makeshift, as in mode ``background``."""
    given = on_gpu(arguments(mat_a=matrix(M, K + 8)[:, :K]))
    costmodel.scaled_mm(**given)
    state = state_of(tuned)
    state.repeats.clear()
    best, launches = tuned.best_config, state.launches.copy()
    state.launches.clear()
    every = configurations(scaled_call(*given.values()))
    first = next(c for c in every if c.num_stages != best.num_stages)
    run = tuned.run

    def late(*args: Any, **kwargs: Any) -> Any:
        made = tuned.fn.run(*args, **kwargs, **first.all_kwargs())
        state.launches.update(launches)
        return made

    monkeypatch.setattr(tuned, "run", late)
    costmodel.scaled_mm(**given)
    monkeypatch.setattr(tuned, "run", run)
    costmodel.scaled_mm(**given)
    found = described(gpu.launches[-1]), gpu.launches[-1].options["num_stages"]
    state.repeats.clear()
    costmodel.scaled_mm(**given, out=torch.zeros(M, N).bfloat16().as_subclass(OnGpu))
    expected = described(gpu.launches[-1]), gpu.launches[-1].options["num_stages"]
    for (_, named), _ in (found, expected):
        del named["c_ptr"]
    assert found == expected


def test_int8_products_are_repeated_too(gpu: Machine) -> None:
    for fill in (1, 2):
        a, b = (torch.full((r, K), fill, dtype=INT8).as_subclass(OnGpu) for r in (M, N))
        out = costmodel.int_mm(a, b.T)
        assert (out.shape, out.dtype) == ((M, N), torch.int32)
        named = gpu.launches[-1].named
        assert named["b_ptr"].data_ptr() == b.data_ptr()
    assert len(state_of(tuned).repeats) == 1


def test_a_full_card_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        Kernels().run(*call_of("int8", 32), kernel="torch")


@pytest.mark.parametrize("form", ["row", "int8", "int32"])
def test_torch_in_a_kernels_place_computes_the_same(form: str) -> None:
    torch.manual_seed(0)
    a = torch.randint(-8, 9, (32, K)).to(INT8 if form.startswith("int") else E4M3)
    b = torch.randint(-8, 9, (N, K)).to(a.dtype)
    sa, sb = torch.rand(32, 1), torch.rand(1, N)
    exact = a.double() @ b.double().T
    if form == "int32":
        call = int_call(a, b.T)
    else:
        bias = torch.randn(N) if form == "int8" else None
        call = scaled_call(a, b.T, sa, ROW, sb, ROW, bias, activation="relu")
        exact = torch.relu(exact * sa * sb + (0.0 if bias is None else bias))
    Kernels().run(*call, kernel="torch")
    torch.testing.assert_close(call[5].double(), exact.double(), atol=1e-2, rtol=1e-2)


def test_the_interpreter_is_off() -> None:
    assert not knobs.runtime.interpret  # else nothing here compiles
