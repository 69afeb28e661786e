"""Launches without Triton's wrappers: what the C launcher is given, with other addresses each time.

The wrappers here are made like those of Triton 3.6 and of 3.7 to 3.9: what they pass on is what our
launches must pass on.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.launch import fast
from costmodel.launch.fast import TritonLaunch
from costmodel.launch.kernel import Kernel
from costmodel.launch.plan import Counters, Plan, Workspace

SCRATCH = ("partial_ptr", "arrivals_ptr")
POINTER = ("a_ptr", "b_ptr", "c_ptr", "bias_ptr", *SCRATCH, "M", "N", "K", "BLOCK_M", "stride_am")
TMA = ("a_desc", "b_desc", "c_desc", "c_ptr", "bias_ptr", "M", "N", "K")

POINTERS = GemmConfig("pointer", 64, 64, 64)
SPLIT = GemmConfig("pointer", 64, 64, 64, split_k=2)
DESCRIPTORS = GemmConfig("tma", 64, 32, 64)


def _address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class CFunction:
    """Notes what it is called with; of a type that is no Python function, as Triton's is."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, *arguments: Any) -> None:
        *base, last = arguments
        own = last if isinstance(last, list | tuple) else [last]
        self.calls.append([_address(x) for x in (*base, *own)])


class Wrapper:
    """As ``CudaLauncher`` of Triton 3.7: scratch memory, signature, then the C function."""

    version = "3.7.1"
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, *hooks = rest[:4]
        self.launch(
            x, y, z, stream, function, False, False, metadata, *hooks, None, None, "annotations",
            b"signature", rest[4:],
        )  # fmt: skip

    @staticmethod
    def with_descriptors(launcher: CFunction, made: list[int]) -> Callable[..., None]:
        def inner(*args: Any) -> None:
            return launcher(*args[:-1], _expanded(args[-1], made))

        return inner


class FlatWrapper(Wrapper):
    """As ``CudaLauncher`` of Triton 3.6: its C functions take the kernel's arguments one by one."""

    version = "3.6.0"

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)

    @staticmethod
    def with_descriptors(launcher: CFunction, made: list[int]) -> Callable[..., None]:
        def inner(*args: Any) -> None:
            return launcher(*args[:13], *_expanded(args[13:], made))

        return inner


def _expanded(arguments: Any, made: list[int]) -> list[Any]:
    found: list[Any] = []
    for x in arguments:
        if hasattr(x, "block_shape"):
            made.append(x.base.data_ptr())
            found += [("map", x.base.data_ptr()), *x.shape, *x.strides]
        else:
            found.append(x)
    return found


WRAPPERS = pytest.mark.parametrize(
    "wrapper", [FlatWrapper, Wrapper], ids=["Triton 3.6", "Triton 3.7"]
)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of torch's, whose current stream can be set."""
    current = SimpleNamespace(handle=5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current.handle, raising=False
    )
    workspace = Workspace(torch.device("cpu"))
    monkeypatch.setattr(fast, "workspace_of", lambda index, stream: workspace)
    return current


def operands(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    a, b, out = (torch.randn(*shape).half() for shape in ((64, 128), (128, 96), (64, 96)))
    return a, b, out


def plan_of(config: GemmConfig, bias: torch.Tensor | None = None) -> Plan:
    return Plan(Workload.from_tensors(*operands(0), bias=bias is not None), config, 132)


def launch_of(plan: Plan, kernel: Kernel) -> TritonLaunch:
    return TritonLaunch(plan, kernel, 0, SimpleNamespace(target=None))


@pytest.mark.fault("B40")
@WRAPPERS
@pytest.mark.parametrize("config", [POINTERS, SPLIT, DESCRIPTORS], ids=str)
@pytest.mark.parametrize("bias", [None, torch.ones(96).half()], ids=["", "bias"])
def test_it_passes_what_the_wrapper_would(
    monkeypatch: pytest.MonkeyPatch,
    stream: SimpleNamespace,
    wrapper: type[Wrapper],
    config: GemmConfig,
    bias: torch.Tensor | None,
) -> None:
    monkeypatch.setattr("triton.__version__", wrapper.version)
    c_function, made = CFunction(), list[int]()
    by_descriptor = config is DESCRIPTORS
    run = wrapper(wrapper.with_descriptors(c_function, made) if by_descriptor else c_function)
    plan = plan_of(config, bias)
    kernel = Kernel(TMA if by_descriptor else POINTER, run, 7, (4, 1, 0))
    launch = launch_of(plan, kernel)
    kept = [operands(seed) for seed in (1, 2)]
    for i, matrices in enumerate((*kept, kept[0])):
        stream.handle = i
        launch(*matrices, bias)
        scratch = plan.scratch(fast.workspace_of(0, i))
        kernel(plan.blocks, i, plan.arguments(*matrices, bias, scratch))
        ours, theirs = c_function.calls[-2:]
        assert ours == theirs
        assert len(c_function.calls) == 2 * (i + 1), "recording queues nothing"
    if by_descriptor:
        assert len(made) == 3 * 3 + 3 * 2, "known addresses need no new descriptors of ours"


@WRAPPERS
def test_no_operand_is_held(monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapper]) -> None:
    monkeypatch.setattr("triton.__version__", wrapper.version)
    run = wrapper(wrapper.with_descriptors(CFunction(), []))
    launch = launch_of(plan_of(DESCRIPTORS), Kernel(TMA, run, 7, (4, 1, 0)))
    matrices = operands(1)
    launch(*matrices, None)
    left = [weakref.ref(x) for x in matrices]
    del matrices
    gc.collect()
    assert [x() for x in left] == [None] * 3


@pytest.mark.fault("B25")
def test_it_is_queued_on_the_device_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.7.1")
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    seen: list[int] = []

    class Seen(CFunction):
        def __call__(self, *_: Any) -> None:
            seen.append(current[0])

    kernel = Kernel(POINTER, Wrapper(Seen()), 7, (4, 1, 0))
    launch = TritonLaunch(plan_of(POINTERS), kernel, 1, SimpleNamespace(target=None))
    for here in (0, 1):
        current[0] = here
        launch(*operands(1), None)
        assert current == [here]
    assert seen == [1, 1]


@WRAPPERS
@pytest.mark.parametrize("has", [[], ["bias_ptr"], ["partial_ptr"], ["arrivals_ptr"]])
def test_what_a_kernel_lacks_is_not_written_in_place_of_another(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapper], has: list[str]
) -> None:
    """As a family of one's own may be: what it lacks has no place among its arguments."""
    monkeypatch.setattr("triton.__version__", wrapper.version)
    c_function, bias = CFunction(), torch.ones(96).half()
    names = ("a_ptr", "b_ptr", "c_ptr", *has, "M", "N", "K", "stride_am")
    plan = plan_of(SPLIT, bias)
    kernel = Kernel(names, wrapper(c_function), 7, (4, 1, 0))
    matrices = operands(1)
    launch_of(plan, kernel)(*matrices, bias)
    scratch = plan.scratch(fast.workspace_of(0, 5))
    kernel(plan.blocks, 5, plan.arguments(*matrices, bias, scratch))
    ours, theirs = c_function.calls
    assert ours == theirs


# --- what is left to Triton's wrappers ----------------------------------------------------------


class Noted(Wrapper):
    """Notes the streams that it is called with; a recording has one of its own."""

    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__(launch)
        self.streams: list[int] = []

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.streams.append(stream)
        super().__call__(x, y, z, stream, *rest)


def streams_of(run: Noted) -> list[int]:
    """The streams of two launches that came by Triton's wrapper."""
    launch = launch_of(plan_of(POINTERS), Kernel(POINTER, run, 7, (4, 1, 0)))
    for seed in (1, 2):
        launch(*operands(seed), None)
    return [stream for stream in run.streams if stream == 5]


@pytest.mark.fault("B40")
@pytest.mark.parametrize(
    ("version", "launch", "needs", "by_triton"),
    [
        ("3.7.1", CFunction(), {}, False),
        ("3.7.1", CFunction(), {"global_scratch_size": 8}, True),
        ("3.7.1", CFunction(), {"profile_scratch_size": 8}, True),
        ("3.7.1", CFunction(), {"gsan_enabled": True}, True),
        ("3.7.1", lambda *_: None, {}, True),  # no C function in it
        ("3.5.1", CFunction(), {}, True),
        ("3.10.0", CFunction(), {}, True),
        ("4.0.0", CFunction(), {}, True),
    ],
)
def test_what_is_not_known_is_left_to_tritons_wrapper(
    monkeypatch: pytest.MonkeyPatch, version: str, launch: Any, needs: dict[str, Any],
    by_triton: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("triton.__version__", version)
    run = Noted(launch)
    vars(run).update(needs)
    assert streams_of(run) == [5, 5] * by_triton


@pytest.fixture
def runtime() -> Iterator[Any]:
    """Triton's knobs of launches, without hooks again afterwards."""
    runtime: Any = knobs.runtime
    with runtime.scope():
        yield runtime
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.calls.clear()


class Binary:
    """Tells hooks of a launch, as ``CompiledKernel`` does."""

    def launch_metadata(self, grid: Any, stream: int, *values: Any) -> Any:
        addresses = [_address(getattr(x, "base", x)) for x in values]
        return {"grid": grid, "stream": stream, "addresses": addresses}


@pytest.mark.fault("N7")
@WRAPPERS
@pytest.mark.parametrize("config", [POINTERS, SPLIT, DESCRIPTORS], ids=str)
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("is_list", [True, False], ids=["in the list", "in its place"])
@pytest.mark.parametrize("first", [True, False], ids=["before the first launch", "later"])
def test_tritons_hooks_are_passed_on_while_they_are_set(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, wrapper: type[Wrapper], config: GemmConfig,
    name: str, is_list: bool, first: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("triton.__version__", wrapper.version)
    c_function, plan = CFunction(), plan_of(config)
    by_descriptor = config is DESCRIPTORS
    run = wrapper(wrapper.with_descriptors(c_function, []) if by_descriptor else c_function)
    kernel = Kernel(TMA if by_descriptor else POINTER, run, 7, (4, 1, 0), Binary())
    launch = launch_of(plan, kernel)
    runtime.debug = True  # another knob, which is no hook

    def hook(_: Any) -> None: ...

    for is_set in (True, False, True) if first else (False, True, False):
        if is_list and is_set:
            getattr(runtime, name).add(hook)
        elif is_list:
            getattr(runtime, name).remove(hook)
        elif is_set:
            setattr(runtime, name, hook)
        elif name in vars(runtime):
            delattr(runtime, name)
        passed = getattr(runtime, name) if is_list else hook
        for seed in (1, 2):
            a, b, out = operands(seed)
            launch(a, b, out, None)
            given = c_function.calls[-1]
            assert (passed in given) == is_set
            told = [x for x in given if isinstance(x, dict)]
            assert [x["stream"] for x in told] == [5] * is_set
            assert all(x.data_ptr() in told[0]["addresses"] for x in (a, b, out) if is_set)
    assert len(c_function.calls) == 6, "each is launched once"


class Twice(Wrapper):
    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments)
        super().__call__(*arguments)


class OtherOrder(Wrapper):
    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        super().__call__(x, y, z, 0, *rest)


class Addresses(Wrapper):
    def __call__(self, *arguments: Any) -> None:
        super().__call__(*(id(x) if type(x) is object else x for x in arguments))


@pytest.mark.fault("B40")
@pytest.mark.parametrize("wrapper", [Twice, OtherOrder, Addresses])
def test_an_unexpected_launch_is_left_to_triton(
    wrapper: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", "3.7.1")
    c_function = CFunction()
    launch = launch_of(plan_of(POINTERS), Kernel(POINTER, wrapper(c_function), 7, (4, 1, 0)))
    a, b, out = operands(1)
    per_call = 2 if wrapper is Twice else 1
    for calls in (1, 2):
        launch(a, b, out, None)
        assert len(c_function.calls) == calls * per_call
        first = c_function.calls[-1].index(a.data_ptr())
        assert c_function.calls[-1][first : first + 3] == [x.data_ptr() for x in (a, b, out)]


# --- what is kept of addresses ------------------------------------------------------------------


@pytest.mark.fault("B15", "B23")
@WRAPPERS
def test_all_launches_share_the_room_for_addresses_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapper]
) -> None:
    monkeypatch.setattr("triton.__version__", wrapper.version)
    monkeypatch.setattr(fast, "ROOM", 8)
    made: list[int] = []
    matrices = [operands(seed) for seed in range(5)]

    def launch_with_descriptors() -> TritonLaunch:
        run = wrapper(wrapper.with_descriptors(CFunction(), made))
        return launch_of(plan_of(DESCRIPTORS), Kernel(TMA, run, 7, (4, 1, 0)))

    def new_descriptors(launch: TritonLaunch, *which: int) -> int:
        before = len(made)
        for i in which:
            launch(*matrices[i], None)
        return (len(made) - before) // 3

    launches = [launch_with_descriptors() for _ in range(5)]
    assert [new_descriptors(launch, 0, 1, 2, 3) for launch in launches] == [4] * 5
    assert [new_descriptors(launch, 0, 1, 2, 3) for launch in launches[3:]] == [0, 0]
    assert new_descriptors(launches[4], 4) == 1
    assert new_descriptors(launches[3], 1, 2, 3) == 0, "one goes, and not all"
    assert new_descriptors(launches[3], 0) == 1
    errors: list[BaseException] = []

    def launch_often(launch: TritonLaunch) -> None:
        try:
            new_descriptors(launch, *range(5), *range(5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=launch_often, args=(launch,)) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.fault("B15")
def test_no_threads_copies_come_between_anothers_and_its_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one stream all copies have one place: what is queued last before a product is read."""
    monkeypatch.setattr("triton.__version__", "3.7.1")
    queued: list[tuple[str, int]] = []

    class SlowCopies:
        def __init__(self, *_: object) -> None:
            pass

        def __call__(self, a: torch.Tensor, b: torch.Tensor, *_: object) -> Any:
            queued.append(("copies", threading.get_ident()))
            time.sleep(0.002)
            return a, b

    class Product:
        def __call__(self, *_: object) -> None:
            queued.append(("product", threading.get_ident()))

    monkeypatch.setattr(fast, "Repack", SlowCopies)
    a, b, out = operands(0)
    plan = Plan(Workload.from_tensors(a, b, out), GemmConfig("tma", 64, 32, 64, repack=True), 132)
    launch = launch_of(plan, Kernel(POINTER, Wrapper(Product()), 7, (4, 1, 0)))
    threads = [
        threading.Thread(target=lambda: [launch(a, b, out, None) for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queued) == 80
    for before, after in zip(queued[::2], queued[1::2], strict=True):
        assert before == ("copies", after[1])
        assert after[0] == "product"


def test_captured_launches_have_counters_of_their_own_that_nothing_fills() -> None:
    device = torch.device("cpu")
    counters = Counters(device)
    assert counters.take(4) is None  # none was launched outside a capture yet
    Workspace(device, counters=counters).get(64, 4)  # fills its own
    _, ours = Workspace(device, apart=True, counters=counters).get(64, 4)
    taken = [Workspace(device, counters=counters).get(64, 4)[1] for _ in range(3)]
    places = {x.data_ptr() for x in (ours, *taken)}
    assert len(places) == 4
    assert all(x.numel() == 4 and not x.any() for x in taken)
    assert counters.take(2**20) is None  # no more: such a launch fills its own again
    assert Workspace(device, counters=counters).get(64, 2**20)[1].numel() == 2**20
