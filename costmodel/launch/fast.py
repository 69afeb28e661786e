"""The launch of a configuration that :func:`costmodel.matmul` keeps: it lacks only addresses.

Triton's wrappers work out the arguments of its C launcher at every launch, which takes as long as
the launch itself. Here they do so once, and later launches only fill in other addresses.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import torch
from torch import _C

from costmodel.bounded import drop_oldest
from costmodel.launch.kernel import STREAM, Kernel, Recording
from costmodel.launch.plan import Plan, Scratch, make_context
from costmodel.launch.repacking import Repack
from costmodel.launch.torch_product import TorchLaunch
from costmodel.launch.workspace import Workspace

log = logging.getLogger("costmodel")


class TritonLaunch:
    """One configuration on operands of one kind: same sizes, strides, alignments and device.

    Attributes:
        config: the configuration.
        result: the choice that this launch follows, a ``TuningResult``.
    """

    def __init__(self, plan: Plan, kernel: Kernel, device_index: int, result: Any) -> None:
        self.result = result
        self.config = plan.config
        self._plan = plan
        self._index = device_index
        self._repack = Repack(plan, result.target, device_index) if plan.config.repack else None
        self._needs_workspace = plan.config.repack or plan.workspace_bytes > 0
        self._queue = _FastLaunch(plan, kernel)

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
        if not self._needs_workspace:
            self._queue(stream, a, b, out, bias, None)
            return
        workspace = _workspace_of(index, stream)  # a name, so that it lives until the launch
        scratch = self._plan.scratch(workspace)
        if self._repack is None:
            self._queue(stream, a, b, out, bias, scratch)
            return
        # All copies of a stream go to one place: no other thread's may come between.
        with _copying:
            a, b = self._repack(a, b, workspace, stream)
            self._queue(stream, a, b, out, bias, scratch)


Launch = TorchLaunch | TritonLaunch

_copying = threading.Lock()


def _workspace_of(index: int, stream: int) -> Workspace:
    """Return the workspace of a stream.

    What is captured gets its own: a graph may be replayed on any stream, at any time, and the
    memory has to stay where it was.
    """
    if torch.cuda.is_current_stream_capturing():
        return Workspace(torch.device("cuda", index))
    found = _workspaces.get((index, stream))
    if found is None:
        with _lock:
            made = Workspace(torch.device("cuda", index), apart=True)
            found = _workspaces.setdefault((index, stream), made)
    return found


_workspaces: dict[tuple[int, int], Workspace] = {}


class _FastLaunch:
    """Queues a plan's kernel. What cannot be recorded is launched by Triton's wrappers."""

    def __init__(self, plan: Plan, kernel: Kernel) -> None:
        self._plan, self._kernel = plan, kernel
        self._id = next(_ids)
        self._is_known = True
        self._recording: Recording | None = None

    def __call__(
        self,
        stream: int,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: Scratch | None,
    ) -> None:
        """Queue it on a raw stream."""
        a_ptr, b_ptr, out_ptr = a.data_ptr(), b.data_ptr(), out.data_ptr()
        found = self._recording
        if found is None:
            key = self._id, a_ptr, b_ptr, out_ptr
            found = _recordings.get(key) or self._record(key, a, b, out)
            if found is None:
                arguments = self._plan.arguments(a, b, out, bias, scratch)
                self._kernel(self._plan.blocks, stream, arguments)
                return
        values = found.arguments.copy()
        a_at, b_at, out_at, bias_at, partial_at, arrivals_at = found.places
        if a_at >= 0:
            values[a_at] = a_ptr
            values[b_at] = b_ptr
            values[out_at] = out_ptr
        if bias is not None:
            values[bias_at] = bias.data_ptr()
        if scratch is not None:
            values[partial_at] = scratch[0].data_ptr()
            values[arrivals_at] = scratch[1].data_ptr()
        if base := found.base:
            found.launcher(*base[:STREAM], stream, *base[STREAM + 1 :], values)
        else:
            values[STREAM] = stream
            found.launcher(*values)

    def _record(
        self, key: _Key, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> Recording | None:
        """Return what Triton passes to its C launcher; None if it launches in an unknown way."""
        make_context()
        if not self._is_known:
            return None
        # A tensor descriptor holds an address, and takes microseconds to make.
        by_address = "a_ptr" not in self._kernel.names
        _, *addresses = key  # and not the operands, so that none is held
        arguments = self._plan.arguments(a, b, out) | dict(zip(_POINTERS, addresses, strict=True))
        open_names = (_NONE if by_address else _POINTERS) + _OTHERS
        try:
            found = self._kernel.record(self._plan.blocks, arguments, open_names)
        except LookupError as error:
            log.info("Triton's own wrappers launch %s: %s", self._plan.config, error)
            self._is_known = False
            return None
        if by_address:
            with _lock:
                _recordings[key] = found
                drop_oldest(_recordings, ROOM)
        else:
            self._recording = found
        return found


_POINTERS, _NONE = ("a_ptr", "b_ptr", "c_ptr"), ("", "", "")
_OTHERS = ("bias_ptr", "partial_ptr", "arrivals_ptr")

_ids = itertools.count()
_lock = threading.Lock()
_Key = tuple[int, int, int, int]  # of a launch, A, B and C
_recordings: dict[_Key, Recording] = {}
ROOM = 2**15
"""Recordings by address of all launches together, about 2 KiB each: operands may keep moving."""
