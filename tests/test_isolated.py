"""Timing in a child: arguments are made there like the program's, and a lost child costs little."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fake_driver import FakeDriver, fake_driver
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.autotune.call import KernelCall
from costmodel.autotune.isolated import IsolatedRunner, Request, loaded
from costmodel.autotune.remade import Storage, describe, remake, remake_storage
from costmodel.compile.ttir import compile_job
from costmodel.data.measurement import Candidate, Measurement
from costmodel.errors import HostError, InvalidInput
from costmodel.processes import SupervisedWorker

BIG = 3 << 19  # bytes, too many to be copied


def there_and_back(*arguments: tuple[str, Any, Any]) -> list[Any]:
    """Describe arguments, send the description, and make them again."""
    storages: dict[int, Storage] = {}
    described = [describe(*argument, storages) for argument in arguments]
    data = pickle.dumps((described, list(storages.values())))
    assert len(data) < 4 << 20
    described, made = pickle.loads(data)
    memory = [remake_storage(storage, "cpu") for storage in made]
    return [remake(each, memory) for each in described]


def remade(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = there_and_back(("x", "*", tensor))[0]
    return found


# --- Arguments ------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2,
]  # fmt: skip


@st.composite
def tensors(draw: Callable[..., Any]) -> torch.Tensor:
    """Views of all kinds: with gaps, transposed, broadcast, empty, somewhere in a storage."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    stride = [draw(st.integers(0, 9)) for _ in shape]
    offset = draw(st.integers(0, 40))
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
    raw = torch.arange((last + 1 + draw(st.integers(0, 20))) * dtype.itemsize) % 2
    memory = raw.to(torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


@given(tensors())
def test_a_small_tensor_is_made_again_byte_for_byte(tensor: torch.Tensor) -> None:
    made = remade(tensor)
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel():
        assert made.data_ptr() % 64 == tensor.data_ptr() % 64
    at, start = made.storage_offset() * made.itemsize, tensor.storage_offset() * tensor.itemsize
    size = tensor.untyped_storage().nbytes()
    assert raw_bytes(made)[at - start :][:size] == raw_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_big_tensor_is_filled_with_numbers_of_its_kind(dtype: torch.dtype) -> None:
    tensor = torch.zeros(BIG * 2 // dtype.itemsize * dtype.itemsize, dtype=torch.uint8).view(dtype)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole:
        tensor[::2] = 1
    made = remade(tensor)
    assert (made.dtype, made.shape) == (dtype, tensor.shape)
    bits = made.view(torch.uint8)
    assert bits.any()
    if whole:
        assert set(made.tolist()) == {0, 1}
    elif dtype != torch.float4_e2m1fn_x2:
        sizes = made.to(torch.complex64).abs()
        assert sizes.isfinite().all()
        assert 0.1 < sizes.mean() < 1


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31))
def test_indices_stay_in_their_range(low: int, more: int) -> None:
    high = min(low + more, 2**31 - 1)
    tensor = torch.full((BIG // 4,), low, dtype=torch.int32)
    tensor[7] = high
    made = remade(tensor)
    assert low <= int(made.min()) <= int(made.max()) <= high


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_numbers_of_all_kinds_are_made(dtype: torch.dtype) -> None:
    span = torch.iinfo(dtype)
    tensor = torch.tensor([span.min, span.max], dtype=dtype).repeat(BIG // dtype.itemsize)
    assert len(set(remade(tensor)[:1000].tolist())) > 200


def test_tensors_in_one_memory_are_in_one_again() -> None:
    packed = torch.randn(3, 64, 64)
    q, v = there_and_back(("q", "*fp32", packed[0]), ("v", "*fp32", packed[2]))
    assert v.data_ptr() - q.data_ptr() == packed[2].data_ptr() - packed[0].data_ptr()
    assert torch.equal(v, packed[2])


def test_a_badly_aligned_tensor_is_so_again() -> None:
    shifted = torch.zeros(BIG, dtype=torch.uint8)[3:]
    assert remade(shifted).data_ptr() % 16 == shifted.data_ptr() % 16


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)))
def test_numbers_are_as_they_are(value: Any) -> None:
    found = there_and_back(("x", "i32", value))[0]
    assert found == value
    assert type(found) is type(value)


def test_tuples_descriptors_and_wrappers_are_made_again() -> None:
    x = torch.randn(64, 64).half()
    tensor = TensorDescriptor.from_tensor(x, [16, 32])
    bits = triton.reinterpret(x.view(torch.int16), tl.float16)
    (a, (number, nothing)), made, plain = there_and_back(
        ("t", ("*fp16", ("i32", "constexpr")), (x, (5, len))),
        ("d", "tensordesc<fp16[16, 32]>", tensor), ("w", "*fp16", bits),
    )  # fmt: skip
    assert torch.equal(a, x)
    assert (number, nothing) == (5, None)
    assert isinstance(made, TensorDescriptor)
    assert (made.shape, made.strides) == (tensor.shape, tensor.strides)
    assert made.block_shape == [16, 32]
    assert torch.equal(made.base, x)
    assert made.base.data_ptr() == a.data_ptr() == plain.data_ptr()


class Opaque:
    dtype = torch.float32

    def data_ptr(self) -> int:
        return 0


def test_what_cannot_be_made_again_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"state\[1\] is a Opaque: expected a tensor"):
        describe("state", ("i32", "*fp32"), (1, Opaque()), {})


# --- The runner -----------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def scale(x_ptr, bias_ptr, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = factor * tl.load(x_ptr + at, mask=at < n)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < n)
    tl.store(x_ptr + at, x, mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def through_numbers(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr).to(tl.pointer_type(tl.float32))
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def doubled(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x.store([0, 0], x.load([0, 0]) * 2)


@pytest.mark.parametrize("isolate", ["compile", True, None])
def test_unknown_ways_to_isolate_are_refused(isolate: Any) -> None:
    with pytest.raises(InvalidInput, match="expected 'timing' or nothing"):
        costmodel.autotune([triton.Config({"BLOCK": 64})], [], isolate=isolate)


BLOCKS = (64, 128, 256, 512)
CRASHES, HANGS = 128, 256


def fake_answer(request: Request | None) -> list[Measurement]:
    """Stand for the child: its clock runs as fast as blocks are large."""
    if request is None:
        return []
    found = []
    for launch in request.launches:
        block = -(-1000 // launch.grid[0])
        if 120 < block < 130:
            print("an illegal memory access", file=os.sys.stderr)  # type: ignore[attr-defined]
            os._exit(3)
        if 240 < block < 260:
            time.sleep(600)
        memory = [remake_storage(storage, "cpu") for storage in request.storages]
        x, _, factor, *_ = remake(launch.values, memory)
        assert (float(x[999]), factor) == (999.0, 2.0)
        found.append(Measurement("ok", 1e4 / block, 1.0, 1.0, 3))
    return found


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[FakeDriver]:
    with fake_driver() as fake, knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield fake


def call_of(kernel: Any, configs: list[Any], *args: Any, grid: Any) -> tuple[KernelCall, Any]:
    tuner = triton.autotune(configs=configs, key=[])(kernel)
    call = KernelCall(tuner, args, {"grid": grid, "warmup": False})
    return call, {str(next(iter(c.kwargs.values()))): c for c in configs}


def scale_call(blocks: tuple[int, ...] = BLOCKS) -> tuple[KernelCall, Any]:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    x = torch.arange(1000, dtype=torch.float32)
    return call_of(scale, configs, x, None, 2.0, 1000, grid=lambda m: (-(-1000 // m["BLOCK"]),))


def test_a_configuration_that_kills_its_process_costs_itself_only(driver: FakeDriver) -> None:
    call, configs = scale_call()
    noted: dict[str, str] = {}
    with SupervisedWorker(fake_answer, limit_s=2.0) as worker:
        runner = IsolatedRunner(
            call, configs, lambda name, m: noted.update({name: m.status}), worker=worker
        )
        found = runner.measure(None, [Candidate(str(block)) for block in BLOCKS])
        again = runner.compare(None, ["64", "512"], 9)
        alone = runner.compare(None, ["64", str(CRASHES), "512"], 9)
        runner.rest()
    assert [m.status for m in found] == ["ok", "crashed", "timeout", "ok"]
    assert "an illegal memory access" in found[1].error
    assert "2 s" in found[2].error
    assert [m.latency_us for m in again] == [found[0].latency_us, found[3].latency_us]
    assert [m.status for m in alone] == ["ok", "crashed", "ok"]
    assert noted == {"64": "ok", "128": "crashed", "256": "timeout", "512": "ok"}
    assert driver.launches == []


def launches_of(call: KernelCall, configs: Any, names: list[str]) -> tuple[Any, list[Any]]:
    """What the child is asked, and what it loads for it."""
    asked: list[Request] = []

    class Worker:
        running = False
        start = staticmethod(lambda: None)

        @staticmethod
        def run(request: Request) -> Any:
            asked.append(pickle.loads(pickle.dumps(request)))
            raise InterruptedError

    runner = IsolatedRunner(call, configs, lambda *_: None, worker=Worker())  # type: ignore[arg-type]
    for name in names:
        with pytest.raises(Exception, match="InterruptedError"):
            runner.measure(None, [Candidate(name)])
    storages = [remake_storage(storage, "cpu") for storage in asked[-1].storages]
    return asked, [loaded(launch, storages) for each in asked for launch in each.launches]


def test_the_child_launches_what_the_program_would(driver: FakeDriver) -> None:
    call, configs = scale_call((64, 512))
    call.launch(configs["64"])  # the program may have loaded a binary before
    asked, (first, second) = launches_of(call, configs, ["64", "512"])
    driver.launches.clear()
    for each in (first, second):
        each.kernel[each.grid](*each.values)
    for name in ("64", "512"):
        call.launch(configs[name])
    made, own = driver.launches[:2], driver.launches[2:]
    assert [(name, grid) for name, grid, _ in made] == [(name, grid) for name, grid, _ in own]
    for (*_, ours), (*_, theirs) in zip(made, own, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
    artifact = compile_job(asked[0].launches[0].job)
    assert artifact.ok
    assert first.kernel.hash == artifact.key


def test_hooks_run_in_the_program(driver: FakeDriver) -> None:
    def hook(named: dict[str, Any]) -> None:
        named["x"].block_shape = [named["BLOCK"], 64]

    configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)]
    x = TensorDescriptor.from_tensor(torch.zeros(64, 64), [1, 64])
    call, named = call_of(doubled, configs, x, grid=(1,))
    _, found = launches_of(call, named, ["16", "32"])
    assert [each.values[0].block_shape for each in found] == [[16, 64], [32, 64]]
    assert found[0].kernel.hash != found[1].kernel.hash


def test_a_configuration_that_does_not_compile_is_no_obstacle(driver: FakeDriver) -> None:
    configs = [
        triton.Config({"BLOCK": 100}), triton.Config({"BLOCK": 64}, num_warps=3),
        triton.Config({"BLOCK": 64}),
    ]  # fmt: skip
    call, _ = call_of(scale, configs, torch.ones(128), None, 2.0, 128, grid=(1,))
    named = {str(i): config for i, config in enumerate(configs)}
    with SupervisedWorker(fake_answer, limit_s=2.0) as worker:
        runner = IsolatedRunner(call, named, lambda *_: None, worker=worker)
        found = runner.measure(None, [Candidate("0"), Candidate("1")])
    assert [m.status for m in found] == ["launch_error", "launch_error"]


def test_what_a_hook_writes_is_zeroed_in_the_child(driver: FakeDriver) -> None:
    def clear(named: dict[str, Any]) -> None:
        named["x_ptr"].zero_()

    configs = [triton.Config({"BLOCK": 64}, pre_hook=clear), triton.Config({"BLOCK": 128})]
    call, named = call_of(scale, configs, torch.ones(128), None, 2.0, 128, grid=(1,))
    _, found = launches_of(call, named, ["64", "128"])
    assert [each.zeroed for each in found] == [["x_ptr"], []]


def test_tensors_of_inference_mode_are_described(driver: FakeDriver) -> None:
    with torch.inference_mode():
        call, configs = scale_call((64, 512))
        _, found = launches_of(call, configs, ["64"])
    assert torch.equal(found[0].values[0], torch.arange(1000.0))


def no_gpu_left() -> None:
    raise RuntimeError("all CUDA-capable devices are busy or unavailable")


def test_a_machine_without_room_for_a_child_is_told(driver: FakeDriver) -> None:
    call, configs = scale_call()
    with SupervisedWorker(fake_answer, limit_s=2.0, setup=no_gpu_left) as worker:
        runner = IsolatedRunner(call, configs, lambda *_: None, worker=worker)
        with pytest.raises(HostError, match="no child process can time"):
            runner.measure(None, [Candidate("64")])


def test_a_kernel_that_makes_pointers_of_numbers_is_refused(driver: FakeDriver) -> None:
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    addresses = torch.zeros(4, dtype=torch.int64)
    call, named = call_of(through_numbers, configs, addresses, 4, grid=(1,))
    with pytest.raises(InvalidInput, match="makes pointers of numbers"):
        IsolatedRunner(call, named, lambda *_: None, worker=None)
