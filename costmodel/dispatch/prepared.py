"""What :func:`costmodel.matmul` keeps between calls: a launch that only lacks its addresses."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from costmodel.launch.launch import Kernel, Plan, Workspace, make_context
from costmodel.launch.recorded import ROOM_OF_ADDRESSES, RecordedLaunch
from costmodel.launch.repacking import Repack
from costmodel.launch.torch_product import torch_product
from costmodel.tuning.tuning_result import TuningResult

__all__ = ["Launch", "TorchLaunch", "TritonLaunch"]

log = logging.getLogger("costmodel")

_Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # A, B and C


class TorchLaunch:
    """The product by ``torch.mm`` (cuBLAS). Serves what no kernel can: sizes of 0."""

    def __init__(
        self, activation: str, result: TuningResult | None = None, tf32: bool = False
    ) -> None:
        self.result = result
        self.config = None
        self._activation, self._tf32 = activation, tf32

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Queue it on the current stream of the operands' device."""
        torch_product(a, b, out, bias, self._activation, self._tf32)


class TritonLaunch:
    """One configuration on operands of one kind: same sizes, strides, alignments and device."""

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel,
        device_index: int,
        operands: _Matrices,
        result: TuningResult,
    ) -> None:
        self.result = result
        self.config = plan.config
        self._plan = plan
        self._kernel = kernel
        self._index = device_index
        self._repack = Repack(plan, result.target, device_index) if plan.config.repack else None
        self._wants_workspace = plan.config.repack or plan.workspace_bytes > 0
        a, b, out = operands
        if self._repack is not None:
            # Only the strides of the copies matter here, and these are the same at every call.
            a, b = plan.aligned(a, b, Workspace(torch.device("meta")))
        self._direct = _Direct.of(plan, kernel, (a, b, out)) or RecordedLaunch.of(plan, kernel)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Queue it on the current stream of the operands' device."""
        index = self._index
        if _C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(a, b, out, bias)
            return
        stream = _C._cuda_getCurrentRawStream(index)
        if self._wants_workspace:
            self._launch_with_workspace(stream, (a, b, out), bias)
        else:
            self._queue(stream, (a, b, out), bias, None)

    def _launch_with_workspace(
        self, stream: int, operands: _Matrices, bias: torch.Tensor | None
    ) -> None:
        plan = self._plan
        # The name keeps the memory from being given away before the launch is queued.
        workspace = _workspace(self._index, stream)
        scratch = None
        if plan.workspace_bytes:
            scratch = workspace.get(plan.workspace_bytes, plan.tiles)
        if self._repack is None:
            self._queue(stream, operands, bias, scratch)
            return
        a, b, out = operands
        # All copies of a stream go to one place: no other thread's may come between.
        with _copying:
            copies = self._repack(a, b, workspace, stream)
            self._queue(stream, (*copies, out), bias, scratch)

    def _queue(
        self,
        stream: int,
        operands: _Matrices,
        bias: torch.Tensor | None,
        scratch: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        if self._direct is not None:
            try:
                self._direct(stream, operands, bias, scratch)
                return
            except LookupError as error:  # a Triton that is not as it was: its own way, then
                log.info("%s", error)
                self._direct = None
        plan = self._plan
        a, b, out = operands
        make_context()
        arguments = plan.numbers(a, b, out) | plan.descriptors(a, b, out)
        arguments |= {"a_ptr": a, "b_ptr": b, "c_ptr": out, "bias_ptr": bias}
        if scratch is not None:
            arguments |= dict(zip(_SCRATCH, scratch, strict=True))
        self._kernel(plan.blocks, stream, arguments)


Launch = TorchLaunch | TritonLaunch


class _Direct:
    """The C launcher of a binary without Triton's wrappers, which take as long again on the host.

    A tensor descriptor takes microseconds to make and depends on nothing but the address, so those
    of the last addresses are kept.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        blocks: int,
        before: tuple[Any, ...],
        numbers: tuple[int | None, ...],
        has_scratch: bool,
        describe: Callable[..., tuple[Any, ...]] | None,
    ) -> None:
        self._launch, self._numbers = launch, numbers
        self._describe = describe
        self._blocks, self._before = blocks, before
        # Up to the addresses, on the last stream.
        self._head = (blocks, 1, 1, 0, *before)
        self._without_scratch = (None, None, *numbers) if has_scratch else numbers
        self._kept: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    @classmethod
    def of(cls, plan: Plan, kernel: Kernel, operands: _Matrices) -> _Direct | None:
        """None where this Triton is built in another way: then its own wrappers are used."""
        if "bias_ptr" not in kernel.names:
            return None
        head = kernel.names[: kernel.names.index("bias_ptr")]
        names = kernel.names[len(head) + 1 :]
        has_scratch = names[: len(_SCRATCH)] == _SCRATCH
        describe = None
        try:
            run: Any = kernel.run
            if run.global_scratch_size or run.profile_scratch_size:
                return None
            if hasattr(run, "arg_annotations"):  # Triton 3.7 on: one C launcher for all binaries
                return None
            flags = (run.launch_cooperative_grid, run.launch_pdl)
            launch = run.launch
            if head != _POINTERS:
                wrapped = inspect.getclosurevars(launch).nonlocals
                launch = wrapped["launcher"]
                describe = _describer(plan, head, tuple(wrapped["tensordesc_meta"]))
        except (ImportError, AttributeError, KeyError, TypeError):
            return None
        numbers = plan.numbers(*operands)
        return cls(
            launch,
            plan.blocks,
            (kernel.function, *flags, None, None, kernel.metadata, None, None, None),
            tuple(numbers.get(n) for n in names[len(_SCRATCH) if has_scratch else 0 :]),
            has_scratch,
            describe,
        )

    def __call__(
        self,
        stream: int,
        operands: _Matrices,
        bias: torch.Tensor | None,
        scratch: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        a, b, out = operands
        first: tuple[Any, ...] = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        if self._describe is not None:
            found = self._kept.get(first)
            if found is None:
                found = self._describe(a, b, out)
                ROOM_OF_ADDRESSES.put(self._kept, first, found)
            first = found
        row = None if bias is None else bias.data_ptr()
        if scratch is not None:
            last = (scratch[0].data_ptr(), scratch[1].data_ptr(), *self._numbers)
        else:
            last = self._without_scratch
        head = self._head
        if head[3] != stream:
            head = self._head = (self._blocks, 1, 1, stream, *self._before)
        self._launch(*(head + first + (row,) + last))  # stars here take longer


_POINTERS = ("a_ptr", "b_ptr", "c_ptr")
_SCRATCH = ("partial_ptr", "arrivals_ptr")


def _describer(
    plan: Plan, names: tuple[str, ...], layouts: tuple[Any, ...]
) -> Callable[..., tuple[Any, ...]]:
    """Makes the arguments of these names: descriptors, and perhaps the address of C."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    def describe(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        make_context()
        found = plan.descriptors(a, b, out)
        layout_of = dict(zip(found, layouts, strict=True))
        arguments: list[Any] = []
        for name in names:
            if name in found:
                # [the map, sizes, strides]: nothing of it holds on to the tensor.
                arguments += make_tensordesc_arg(found[name], layout_of[name])
            else:
                arguments.append(out.data_ptr() if name == "c_ptr" else None)
        return tuple(arguments)

    return describe


def _workspace(index: int, stream: int) -> Workspace:
    """The scratch memory of a stream. What is captured gets its own: a graph may be replayed on
    any stream, at any time, and the memory has to stay where it was.
    """
    if torch.cuda.is_current_stream_capturing():
        return Workspace(torch.device("cuda", index))
    found = _workspaces.get((index, stream))
    if found is None:
        with _lock:
            made = Workspace(torch.device("cuda", index), apart=True)
            found = _workspaces.setdefault((index, stream), made)
    return found


_lock = threading.RLock()
_copying = threading.Lock()
_workspaces: dict[tuple[int, int], Workspace] = {}
