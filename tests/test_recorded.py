"""Launches of Triton 3.7 to 3.9: what its wrappers would pass on, with other addresses.

The wrappers here are made up like Triton's: what they pass on is what ours must.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from costmodel.dispatch.prepared import TritonLaunch, _Direct
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.launch.launch import Kernel, Plan
from costmodel.launch.recorded import RecordedLaunch
from costmodel.support.bounded import SharedRoom

SCRATCH = ("partial_ptr", "arrivals_ptr")
POINTER = ("a_ptr", "b_ptr", "c_ptr", "bias_ptr", *SCRATCH, "M", "N", "K", "BLOCK_M", "stride_am")
TMA = ("a_desc", "b_desc", "c_desc", "c_ptr", "bias_ptr", "M", "N", "K")


class CFunction:
    """Notes what it is called with; of a type that is no Python function, as Triton's is."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        *base, last = arguments
        self.calls.append((*base, [_address(x) for x in last]))


def _address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class Wrapper:
    """As ``CudaLauncher`` of Triton 3.7: scratch memory, signature, then the C function."""

    global_scratch_size = profile_scratch_size = 0
    arg_annotations = ("annotations",)

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, *hooks = rest[:4]
        self.launch(
            x, y, z, stream, function, False, False, metadata, *hooks, None, None,
            self.arg_annotations, b"signature", rest[4:],
        )  # fmt: skip


def with_descriptors(launcher: CFunction, made: list[int]) -> Callable[..., None]:
    def inner(*args: Any) -> None:
        base, last = args[:-1], args[-1]
        final = []
        for x in last:
            if hasattr(x, "block_shape"):
                made.append(x.base.data_ptr())
                final += [("map", x.base.data_ptr()), *x.shape, *x.strides]
            else:
                final.append(x)
        return launcher(*base, final)

    return inner


@pytest.fixture(autouse=True)
def newer_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.7.1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def operands(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    a, b, out = (torch.randn(*shape).half() for shape in ((64, 128), (128, 96), (64, 96)))
    return a, b, out


def plan_of(config: GemmConfig, bias: torch.Tensor | None) -> Plan:
    return Plan.of(Workload.from_tensors(*operands(0), bias=bias is not None), config, 132)


@pytest.mark.fault("B40")
@pytest.mark.parametrize("config", [
    GemmConfig("pointer", 64, 64, 64), GemmConfig("pointer", 64, 64, 64, split_k=2),
    GemmConfig("tma", 64, 32, 64),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias", [None, torch.ones(96).half()], ids=["", "bias"])
def test_it_passes_what_the_wrapper_would(config: GemmConfig, bias: torch.Tensor | None) -> None:
    c_function, made = CFunction(), []
    launch = c_function if config.kernel == "pointer" else with_descriptors(c_function, made)
    plan, names = plan_of(config, bias), POINTER if config.kernel == "pointer" else TMA
    kernel = Kernel(names, Wrapper(launch), 7, (4, 1, 0))
    recorded = RecordedLaunch.of(plan, kernel)
    assert recorded is not None
    kept = [operands(seed) for seed in (1, 2)]
    for stream, matrices in enumerate((*kept, kept[0])):
        scratch = None
        extra: dict[str, Any] = {"bias_ptr": bias}
        if plan.workspace_bytes:
            scratch = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
            extra |= dict(zip(SCRATCH, scratch, strict=True))
        recorded(stream, matrices, bias, scratch)
        pointers = dict(zip(("a_ptr", "b_ptr", "c_ptr"), matrices, strict=True))
        own = plan.numbers(*matrices) | plan.descriptors(*matrices) | pointers | extra
        kernel(plan.blocks, stream, own)
        ours, theirs = c_function.calls[-2:]
        assert ours == theirs
        assert len(c_function.calls) == 2 * (stream + 1), "recording queues nothing"
    if config.kernel == "tma":
        assert len(made) == 3 * 3 + 3 * 2, "known addresses need no new descriptors of ours"


def test_no_operand_is_held() -> None:
    plan = plan_of(GemmConfig("tma", 64, 32, 64), None)
    recorded = RecordedLaunch.of(
        plan, Kernel(TMA, Wrapper(with_descriptors(CFunction(), [])), 7, (4, 1, 0))
    )
    assert recorded is not None
    recorded(0, operands(1), None, None)
    (recording,) = recorded._kept.values()
    assert not any(isinstance(x, torch.Tensor) for x in recording.kernel)


def without_a_cell(launcher: CFunction) -> Callable[..., None]:
    return lambda *args: None


@pytest.mark.fault("B40")
def test_what_is_not_known_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(GemmConfig("pointer", 64, 64, 64), None)

    def recorded(run: Any) -> RecordedLaunch | None:
        return RecordedLaunch.of(plan, Kernel(POINTER, run, 7, (4, 1, 0)))

    assert recorded(Wrapper(CFunction())) is not None
    assert recorded(Wrapper(without_a_cell(CFunction()))) is None
    assert recorded(SimpleNamespace(launch=CFunction())) is None
    for name, value in (("global_scratch_size", 8), ("gsan_enabled", True)):
        run = Wrapper(CFunction())
        setattr(run, name, value)
        assert recorded(run) is None, name
    for version in ("3.6.0", "3.10.0", "4.0.0"):
        monkeypatch.setattr("triton.__version__", version)
        assert recorded(Wrapper(CFunction())) is None, version


class Twice(Wrapper):
    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments)
        super().__call__(*arguments)


class OtherOrder(Wrapper):
    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        super().__call__(x, y, z, 0, *rest)


class Addresses(Wrapper):
    def __call__(self, *arguments: Any) -> None:
        super().__call__(*(id(x) if type(x).__name__ == "_Mark" else x for x in arguments))


@pytest.mark.fault("B40")
@pytest.mark.parametrize("wrapper", [Twice, OtherOrder, Addresses])
def test_an_unexpected_launch_is_left_to_triton(
    wrapper: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    c_function = CFunction()
    plan, kernel = plan_of(GemmConfig("pointer", 64, 64, 64), None), None
    kernel = Kernel(POINTER, wrapper(c_function), 7, (4, 1, 0))
    a, b, out = operands(1)
    launch = TritonLaunch(plan, kernel, 0, (a, b, out), SimpleNamespace(target=None))  # type: ignore[arg-type]
    for calls in (1, 2):
        launch(a, b, out, None)
        per_call = 2 if wrapper is Twice else 1
        assert len(c_function.calls) == calls * per_call
        if wrapper is not Addresses:
            assert c_function.calls[-1][-1][:3] == [x.data_ptr() for x in (a, b, out)]


# --- what is kept of addresses -----------------------------------------------------------------


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> SharedRoom:
    small = SharedRoom(8)
    monkeypatch.setattr("costmodel.launch.recorded.ROOM_OF_ADDRESSES", small)
    monkeypatch.setattr("costmodel.dispatch.prepared.ROOM_OF_ADDRESSES", small)
    return small


Launching = tuple[Callable[[int], object], dict[Any, Any]]


def recorded_launch(made: list[int]) -> Launching:
    plan = plan_of(GemmConfig("tma", 64, 32, 64), None)
    run = Wrapper(with_descriptors(CFunction(), []))
    recorded = RecordedLaunch.of(plan, Kernel(TMA, run, 7, (4, 1, 0)))
    assert recorded is not None
    real, matrices = recorded._record, [operands(seed) for seed in range(20)]

    def record(of: Any) -> Any:
        made.append(1)
        return real(of)

    recorded._record = record  # type: ignore[method-assign]
    return lambda i: recorded(0, matrices[i], None, None), recorded._kept


def direct_launch(made: list[int]) -> Launching:
    def describe(*_: object) -> tuple[int, ...]:
        made.append(1)
        return (1,)

    direct = _Direct(lambda *_: None, 1, (), (), False, describe)
    matrices = [operands(seed) for seed in range(20)]
    return lambda i: direct(0, matrices[i], None, None), direct._kept


@pytest.mark.fault("B23")
@pytest.mark.parametrize("launch_of", [recorded_launch, direct_launch])
def test_all_launches_share_the_room_for_addresses_and_the_oldest_goes(
    room: SharedRoom, launch_of: Callable[[list[int]], Launching]
) -> None:
    made: list[int] = []
    launches = [launch_of(made) for _ in range(5)]
    for call, _ in launches:
        for i in range(4):
            call(i)
    assert [len(kept) for _, kept in launches] == [0, 0, 0, 4, 4]
    before = len(made)
    for call, _ in launches[3:]:
        for i in range(4):
            call(i)
    assert len(made) == before, "the last ones are there"
    launches[4][0](4)
    assert [len(kept) for _, kept in launches] == [0, 0, 0, 3, 5], "one goes, and not all"


def test_what_depends_on_no_address_stays(room: SharedRoom) -> None:
    plan = plan_of(GemmConfig("pointer", 64, 64, 64), None)
    recorded = RecordedLaunch.of(plan, Kernel(POINTER, Wrapper(CFunction()), 7, (4, 1, 0)))
    assert recorded is not None
    for seed in range(20):
        recorded(0, operands(seed), None, None)
    assert len(recorded._kept) == 1
    assert not room._entries


@pytest.mark.fault("B15", "B23")
def test_threads_that_put_at_once_keep_no_more_than_there_is_room_for() -> None:
    room = SharedRoom(16)
    kept: list[dict[int, int]] = [{} for _ in range(4)]

    def put(thread: int) -> None:
        for i in range(2000):
            room.put(kept[(thread + i) % 4], i % 50, i)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, kept)) == len(room._entries) == 16
