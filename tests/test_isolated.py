"""Timing in a child: arguments are made there like the program's, and a lost child costs little."""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import machine_without_gpu
from fake_driver import FakeDriver, fake_driver
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.autotune import isolated
from costmodel.autotune.arguments import span
from costmodel.autotune.call import KernelCall
from costmodel.autotune.isolated import IsolatedRunner, Launch, Request, loaded
from costmodel.compile.ttir import compile_job
from costmodel.data.measurement import Candidate, Measurement
from costmodel.errors import HostError, InvalidInput
from costmodel.processes import Done, SupervisedWorker

COPIED = 1 << 20  # bytes of a tensor


def there_and_back(*arguments: Any) -> tuple[Any, ...]:
    """Pickle arguments, and make them again in other memory."""
    data = isolated.pickled(arguments)
    assert len(data) < 4 << 20
    isolated.answer(None)
    found: tuple[Any, ...] = pickle.loads(data)
    return found


def again(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = there_and_back(tensor)[0]
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


@given(tensors())
def test_a_small_tensor_is_made_again_byte_for_byte(tensor: torch.Tensor) -> None:
    made = again(tensor)
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel():
        assert made.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(span(made), span(tensor))
    assert not tensor.numel() or made.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("more", [0, 96, 1 << 20])
def test_a_big_tensor_repeats_how_it_begins(dtype: torch.dtype, more: int) -> None:
    """So there are numbers of its kind in it, and an index stays one."""
    held = torch.randint(256, (COPIED + more,), dtype=torch.uint8)
    made = again(held.view(dtype))
    assert (made.dtype, made.numel()) == (dtype, len(held) // dtype.itemsize)
    bits = made.view(torch.uint8)
    assert torch.equal(bits[:COPIED], held[:COPIED])
    assert torch.equal(bits[COPIED:], held[:more])


def test_a_tensor_of_many_megabytes_is_filled_to_its_end() -> None:
    made = again(torch.arange(COPIED // 4, dtype=torch.int32).repeat(6)[:-100])
    assert torch.equal(made, (torch.arange(len(made)) % (COPIED // 4)).int())


def test_what_is_in_the_middle_of_a_big_memory_is_copied() -> None:
    """An allocator of the program's own may keep all in one storage."""
    pool = torch.zeros(5 * COPIED, dtype=torch.uint8)
    pool[4 * COPIED :] = 7
    lengths = pool[3 * COPIED : 3 * COPIED + 400].view(torch.int32)
    lengths.copy_(torch.arange(100))
    found, other = there_and_back(lengths, pool[4 * COPIED :])
    assert torch.equal(found, lengths)
    assert torch.equal(other, pool[4 * COPIED :])


def test_tensors_in_one_memory_are_in_one_again() -> None:
    packed = torch.randn(3, 64, 64)
    q, v = there_and_back(packed[0], packed[2])
    assert v.data_ptr() - q.data_ptr() == packed[2].data_ptr() - packed[0].data_ptr()
    assert torch.equal(v, packed[2])


def test_unpickled_again_a_tensor_is_as_it_was() -> None:
    data = isolated.pickled(torch.arange(9))
    first = pickle.loads(data)
    first.zero_()
    assert torch.equal(pickle.loads(data), torch.arange(9))
    assert first.tolist() == list(range(9)), "the memory is made once"


def test_a_badly_aligned_tensor_is_so_again() -> None:
    shifted = torch.zeros(2 * COPIED, dtype=torch.uint8)[3:]
    assert again(shifted).data_ptr() % 16 == shifted.data_ptr() % 16


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)))
def test_numbers_are_as_they_are(value: Any) -> None:
    found = there_and_back(value)[0]
    assert found == value
    assert type(found) is type(value)


def test_tuples_descriptors_and_wrappers_are_made_again() -> None:
    x = torch.randn(64, 64).half()
    tensor = TensorDescriptor.from_tensor(x, [16, 32])
    bits = triton.reinterpret(x.view(torch.int16), tl.float16)
    (a, (number, nothing)), made, plain = there_and_back((x, (5, None)), tensor, bits)
    assert torch.equal(a, x)
    assert (number, nothing) == (5, None)
    assert isinstance(made, TensorDescriptor)
    assert (made.shape, made.strides) == (tensor.shape, tensor.strides)
    assert made.block_shape == [16, 32]
    assert torch.equal(made.base, x)
    assert made.base.data_ptr() == a.data_ptr() == plain.data_ptr()


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.requires_grad_().exp()])
def test_tensors_that_autograd_knows_are_made_again(kind: Any) -> None:
    assert torch.equal(again(kind(torch.ones(8))), kind(torch.ones(8)))


class Opaque:
    dtype = torch.float32

    def data_ptr(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "an opaque one"


def test_what_cannot_be_made_again_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"an opaque one is an argument: expected a tensor"):
        isolated.pickled((1, Opaque()))


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
        x, _, factor, *_ = pickle.loads(launch.values)
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


def test_a_child_tells_who_is_outvoted_though_it_is_no_finalist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: dict[str, str] = {}

    class Worker:
        """Answers here what a child answers."""

        running = False

        def start(self) -> None: ...

        def run(self, request: Any) -> Done[Any]:
            return Done(isolated.answer(pickle.loads(pickle.dumps(request))))

    with machine_without_gpu(tmp_path / "kernels") as machine:

        def launch(grid: Any, x: torch.Tensor, bias: Any, factor: float, *_: Any) -> None:
            is_wrong = grid[0] == 8  # programs: of 128
            machine.now_us += 1e2 * grid[0]
            x.mul_(factor + is_wrong)

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return functools.partial(launch, grid)

        monkeypatch.setattr(triton, "compile", lambda *_, **__: Kernel())
        call, configs = scale_call()
        call.keep({"x_ptr"})
        runner = IsolatedRunner(
            call, configs, lambda name, m: noted.update({name: m.status}), agree=True,
            worker=Worker(),  # type: ignore[arg-type]
        )  # fmt: skip
        runner.measure(None, [Candidate(str(block)) for block in BLOCKS])
        assert set(noted.values()) == {"ok"}
        noted |= {name: outcome.status for name, outcome in runner.outvoted().items()}
    assert noted == {str(b): "wrong_result" if b == 128 else "ok" for b in BLOCKS}


@pytest.mark.slow
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


def requests_of(run: Callable[[Any], object]) -> list[Request]:
    """What a child is asked, if it times all in 10 us."""
    asked: list[Request] = []

    class Worker:
        running = False
        start = staticmethod(lambda: None)

        @staticmethod
        def run(request: Request) -> Done[list[Measurement]]:
            asked.append(pickle.loads(pickle.dumps(request)))
            return Done([Measurement("ok", 10.0)] * len(request.launches))

    run(Worker())
    return asked


def test_the_child_starts_each_launch_with_the_same_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It times in turn, compares results, and forgets a call when the next one comes."""
    call, configs = scale_call()
    call.keep({"x_ptr"})

    def ask(worker: Any) -> None:
        runner = IsolatedRunner(call, configs, lambda *_: None, agree=True, worker=worker)
        runner.measure(None, [Candidate(str(block)) for block in BLOCKS])
        runner.compare(None, [str(block) for block in BLOCKS], 9)

    with machine_without_gpu(tmp_path) as machine:
        asked = requests_of(ask)
        seen: list[float] = []

        def launch(
            grid: tuple[int, ...], x: torch.Tensor, bias: Any, factor: float, *_: Any
        ) -> None:
            block = -(-1000 // grid[0])
            seen.append(float(x[999]))
            machine.now_us += 1e4 / block
            x.mul_(factor + (120 < block < 130))

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return functools.partial(launch, grid)

        monkeypatch.setattr(triton, "compile", lambda *_, **__: Kernel())
        found = [m for request in asked[:-1] for m in isolated.answer(request)]
        compared = isolated.answer(asked[-1])
        another = replace(asked[0], token=asked[0].token + 1)
        assert isolated.answer(another)[0].ok
        assert isolated.answer(None) == []
    assert [m.status for m in found] == ["ok"] * 4
    assert found[0].latency_us > found[1].latency_us > found[3].latency_us
    assert [m.status for m in compared] == ["ok", "wrong_result", "ok", "ok"]
    assert set(seen) == {999.0}


def test_a_child_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    call, configs = scale_call()
    with machine_without_gpu(tmp_path):
        (request,) = requests_of(
            lambda worker: IsolatedRunner(call, configs, lambda *_: None, worker=worker).compare(
                None, ["64", "512"]
            )
        )
        monkeypatch.setattr(triton, "compile", lambda *_, **__: None)
        monkeypatch.setattr(torch, "zeros", full)
        found = isolated.answer(request)
    assert [m.no_room for m in found] == [True, True]


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
    return asked, [loaded(launch) for each in asked for launch in each.launches]


def arguments_of(launch: Launch) -> Any:
    return pickle.loads(launch.values)


def test_the_child_launches_what_the_program_would(driver: FakeDriver) -> None:
    call, configs = scale_call((64, 512))
    call.launch(configs["64"])  # the program may have loaded a binary before
    asked, (first, second) = launches_of(call, configs, ["64", "512"])
    driver.launches.clear()
    for each in (first, second):
        each.kernel[each.grid](*arguments_of(each))
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
    assert [arguments_of(each)[0].block_shape for each in found] == [[16, 64], [32, 64]]
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


def test_each_launch_finds_what_the_hooks_have_left(driver: FakeDriver) -> None:
    def fill(named: dict[str, Any]) -> None:
        named["x_ptr"].fill_(-1)

    x = torch.ones(128)
    configs = [triton.Config({"BLOCK": 64}, pre_hook=fill), triton.Config({"BLOCK": 128})]
    call, named = call_of(scale, configs, x, x.clone(), 2.0, 128, grid=(1,))
    call.tuner.reset_to_zero.append("bias_ptr")
    call.keep({"x_ptr", "bias_ptr"})
    _, found = launches_of(call, named, ["64", "128"])
    x.fill_(3)
    for launch in found:
        assert arguments_of(launch)[0].tolist() == [-1] * 128
        assert arguments_of(launch)[1].tolist() == [0] * 128
    call.restore()
    assert x.tolist() == call.named["bias_ptr"].tolist() == [1] * 128


def test_tensors_of_inference_mode_are_described(driver: FakeDriver) -> None:
    with torch.inference_mode():
        call, configs = scale_call((64, 512))
        _, found = launches_of(call, configs, ["64"])
    assert torch.equal(arguments_of(found[0])[0], torch.arange(1000.0))


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
