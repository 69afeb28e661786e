"""A kept launch, without a GPU: what the device would be given, in what order."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from costmodel.dispatch import prepared
from costmodel.dispatch.prepared import TritonLaunch
from costmodel.errors import LaunchError
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch import launch, repacking
from costmodel.launch.launch import Kernel, Plan, Workspace


@pytest.mark.fault("B15")
def test_no_threads_copies_come_between_anothers_and_its_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one stream all copies have one place: what is queued last before a product is read."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(prepared, "_workspace", lambda index, stream: None)
    queued: list[tuple[str, int]] = []

    def copy(a: torch.Tensor, b: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        queued.append(("copies", threading.get_ident()))
        time.sleep(0.002)
        return a, b

    def product(*_: object) -> None:
        queued.append(("product", threading.get_ident()))

    launch = object.__new__(TritonLaunch)
    launch.__dict__.update(
        _index=0,
        _plan=SimpleNamespace(workspace_bytes=0),
        _wants_workspace=True,
        _repack=copy,
        _direct=product,
    )
    x = torch.zeros(1, 1)
    threads = [
        threading.Thread(target=lambda: [launch(x, x, x, None) for _ in range(10)])
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


@pytest.mark.parametrize(
    ("k", "n", "launches"),
    [(1001, 50, [(7 * 4 + 63 * 1, 28)]), (96, 50, [(6, None)]), (96, 64, [])],
)
def test_all_copies_are_one_launch(
    k: int, n: int, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 16 rows and 256 columns; none where both operands are aligned."""
    queued: list[object] = []

    def load(dtype: str, a_unit: bool | None, b_unit: bool | None, *_: object) -> object:
        return lambda blocks, stream, arguments: queued.append((blocks, arguments.get("a_blocks")))

    monkeypatch.setattr(repacking, "load_repack", load)
    a, b, out = (torch.zeros(*shape).half() for shape in ((100, k), (k, n), (100, n)))
    config = GemmConfig("tma", 64, 64, 64, repack=True)
    plan = Plan.of(Workload.from_tensors(a, b, out), config, 132)
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    copies = repacking.Repack(plan, target, 0)(a, b, Workspace(a.device), 0)
    assert queued == launches
    assert [x.stride(0) for x in copies] == [-(-k // 64) * 64 if k % 8 else k, 56 if n % 8 else n]


@pytest.mark.fault("B40")
def test_a_launcher_of_another_kind_is_called_by_tritons_own_wrapper() -> None:
    """From Triton 3.7 on the C launcher takes other arguments, and in another order."""
    a, b, out = (torch.zeros(64, 64).half() for _ in range(3))
    plan = Plan.of(Workload.from_tensors(a, b, out), GemmConfig("pointer", 64, 64, 64), 132)
    names = ("a_ptr", "b_ptr", "c_ptr", "bias_ptr", "partial_ptr", "arrivals_ptr", "M", "N", "K")
    launched: list[object] = []
    run = SimpleNamespace(
        global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
        launch_pdl=False, launch=lambda *arguments: launched.append(arguments),
    )  # fmt: skip
    kernel = Kernel(names, run, 7, (4, 1, 0))  # type: ignore[arg-type]
    assert prepared._Direct.of(plan, kernel, (a, b, out)) is not None
    run.arg_annotations = []
    assert prepared._Direct.of(plan, kernel, (a, b, out)) is None


def test_scratch_memory_is_kept_and_grows() -> None:
    """What a launch asks for again is there; a larger one's serves a smaller one."""
    workspace = Workspace(torch.device("cpu"))
    partial, arrivals = small = workspace.get(4 * 100, 7)
    assert (partial.numel(), arrivals.numel()) == (100, 7)
    assert workspace.get(4 * 100, 7) is small
    for size_bytes, tiles in ((4 * 101, 7), (4 * 100, 8), (4 * 50, 900)):
        partial, arrivals = workspace.get(size_bytes, tiles)
        assert 4 * partial.numel() >= size_bytes
        assert arrivals.numel() >= tiles
        assert not arrivals.any()
    assert workspace.get(4, 1) == (partial, arrivals)


class FakeBinary:
    """As Triton's ``CompiledKernel``, which unloads itself when nothing holds it (3.8 on)."""

    src = SimpleNamespace(fn=SimpleNamespace(arg_names=["a_ptr"]))
    run, function, packed_metadata = print, 7, (4, 1, 0)

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.asm, self.kernel = {"ptx": "text"}, b"code"

    def _init_handles(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def loaded(monkeypatch: pytest.MonkeyPatch, *binaries: FakeBinary) -> Kernel:
    left = [*binaries]
    monkeypatch.setattr(launch, "compiled", lambda *_: left.pop())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    return launch.load_source(None, None, "it", target, 0)  # type: ignore[arg-type]


def test_a_binary_stays_loaded_while_it_may_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = loaded(monkeypatch, FakeBinary())
    monkeypatch.undo()
    gc.collect()
    binaries = [x for x in gc.get_objects() if type(x) is FakeBinary]
    assert len(binaries) == 1, "unloaded, and its function handle is of nothing"
    assert binaries[0].asm is binaries[0].kernel is None, "thousands may be loaded"
    there = weakref.ref(binaries.pop())
    del kernel
    gc.collect()
    assert there() is None


def test_no_memory_for_a_binary_is_a_reason_to_take_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(LaunchError, match=r"it cannot be loaded: .*out of memory"):
        loaded(monkeypatch, FakeBinary("Triton Error [CUDA]: out of memory"))
    with pytest.raises(RuntimeError, match="illegal"):
        loaded(monkeypatch, FakeBinary("Triton Error [CUDA]: an illegal memory access"))


@pytest.mark.fault("B08")
@pytest.mark.parametrize("kernel", ["pointer 16x64x64 w4 s3 g8", "tma 64x64x64 w4 s3 g8"])
def test_a_stride_that_is_never_used_may_be_of_any_size(kernel: str) -> None:
    """Of one row, as the last token's of a long context: the kernels take 32-bit numbers."""
    far = 2**33
    a, b, out = (
        torch.empty_strided(size, strides, dtype=torch.float16)
        for size, strides in (((1, 64), (far, 1)), ((64, 1), (1, far)), ((1, 1), (far, far)))
    )
    workload = Workload.from_tensors(a, b, out)
    assert not workload.code.wide
    plan = Plan.of(workload, parse_config(kernel), 132)
    numbers = plan.numbers(a, b, out)
    assert max(numbers.values()) < 2**31
    assert (numbers["stride_ak"], numbers["stride_bk"]) == (1, 1)
