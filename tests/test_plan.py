"""Plans, their scratch memory and copies, and binaries that are loaded; without a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from costmodel.errors import LaunchError
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch import kernel as loading
from costmodel.launch import plan as planning
from costmodel.launch.kernel import Kernel
from costmodel.launch.plan import Plan, Repack, Workspace


@pytest.mark.parametrize(
    ("k", "n", "launches"),
    [(1001, 50, [(7 * 4 + 63 * 1, 28)]), (96, 50, [(6, None)]), (96, 64, [])],
)
def test_all_copies_are_one_launch(
    k: int, n: int, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 16 rows and 256 columns; none where both operands are aligned."""
    queued: list[object] = []

    def load(*_: object) -> object:
        return lambda blocks, stream, arguments: queued.append((blocks, arguments.get("a_blocks")))

    monkeypatch.setattr(planning, "load", load)
    a, b, out = (torch.zeros(*shape).half() for shape in ((100, k), (k, n), (100, n)))
    config = GemmConfig("tma", 64, 64, 64, repack=True)
    plan = Plan(Workload.from_tensors(a, b, out), config, 132)
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    copies = Repack(plan, target, 0)(a, b, Workspace(a.device), 0)
    assert queued == launches
    assert [x.stride(0) for x in copies] == [-(-k // 64) * 64 if k % 8 else k, 56 if n % 8 else n]


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
    monkeypatch.setattr(loading, "compiled", lambda *_: left.pop())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    spec = specialize(Workload.dense(64, 64, 64), GemmConfig("pointer", 64, 64, 64))
    return loading.load.__wrapped__(spec, target, 0, remember=False)


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
    with pytest.raises(LaunchError, match=r"cannot be loaded: .*out of memory"):
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
    plan = Plan(workload, parse_config(kernel), 132)
    numbers = {k: v for k, v in plan.arguments(a, b, out).items() if isinstance(v, int)}
    assert max(numbers.values()) < 2**31
    assert (numbers["stride_ak"], numbers["stride_bk"]) == (1, 1)
