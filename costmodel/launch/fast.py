"""The launches that :func:`costmodel.matmul` keeps, of a configuration or of torch.

Triton's wrappers work out the arguments of its C launcher at every launch, which takes as long as
the launch itself. Here they do so once, and later launches only fill in other addresses.
"""

import copy
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from threading import Lock, RLock
from typing import Any, Self

import torch
from torch import _C, Tensor
from torch.nn import functional

from costmodel.gemm.config import GemmConfig
from costmodel.launch.kernel import STREAM, Kernel, Recording
from costmodel.launch.plan import Counters, Pair, Plan, Repack, Workspace
from costmodel.validation import drop_oldest, log

MaybeTensor = Tensor | None
_Key = tuple[int, int, int, int]  # of a launch, A, B and C


class TritonLaunch:
    """One configuration on operands of one kind: same sizes, strides, alignments and device.

    The arguments that Triton's wrappers pass on are recorded at the first launch; later launches
    only fill in addresses. A launch that cannot be recorded goes through the wrappers.

    Attributes:
        config: the configuration.
        result: the choice that this launch follows, a ``TuningResult``.
    """

    def __init__(self, plan: Plan, kernel: Kernel, device_index: int, result: Any):
        self.result = result
        self.config = plan.config
        self._plan, self._kernel = plan, kernel
        self._index = device_index
        self._repack = Repack(plan, result.target, device_index) if plan.config.repack else None
        self._needs_workspace = plan.config.repack or plan.workspace_bytes > 0
        self._id = next(_ids)
        self._may_record = True
        self._recording: Recording | None = None
        self._is_layer = False

    def of_layer(self) -> Self:
        """Return the same launch for a B that is given as the weight [n, k] of a layer."""
        made = copy.copy(self)
        made._id, made._recording, made._is_layer = next(_ids), None, True
        return made

    def _matrices(self, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands as matrices: a batch has the memory of one."""
        if a.ndim != 2:
            a, out = a.view(-1, a.size(-1)), out.view(-1, out.size(-1))
        return a, b.T if self._is_layer else b, out

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: MaybeTensor) -> None:
        """Queue the kernel on the current stream of the operands' device.

        Args:
            a, out: matrices, or batches whose rows are those of one matrix.
        """
        index = self._index
        if _C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(a, b, out, bias)
            return
        stream = _C._cuda_getCurrentRawStream(index)
        if not self._needs_workspace:
            self._queue(stream, a, b, out, bias, None)
            return
        workspace = workspace_of(index, stream)  # a name, so that it lives until the launch
        scratch = self._plan.scratch(workspace)
        if self._repack is None:
            self._queue(stream, a, b, out, bias, scratch)
            return
        # All copies of a stream go to one place: those of another thread must not come between.
        a, b, out = self._matrices(a, b, out)
        with _copying:
            a, b = self._repack(a, b, workspace, stream)
            self._queue(stream, a, b, out, bias, scratch)

    def _queue(
        self,
        stream: int,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: MaybeTensor,
        scratch: Pair | None,
    ) -> None:
        """Queue the kernel on a raw stream."""
        a_ptr, b_ptr, out_ptr = a.data_ptr(), b.data_ptr(), out.data_ptr()
        found = self._recording
        own, enter, leave = self._kernel.hooks
        if (own or enter.calls or leave.calls) and self._kernel.launch_hooks():
            _make_context()  # for Triton's wrappers, which call the hooks
            found = None
        elif found is None:
            key = self._id, a_ptr, b_ptr, out_ptr
            found = _recordings.get(key) or self._record(key, a, b, out)
        if found is None:
            arguments = self._arguments(a, b, out, bias, scratch)
            self._kernel(self._plan.blocks, stream, arguments)
            return
        values = found.arguments.copy()
        a_at, b_at, out_at, bias_at, partial_at, arrivals_at = found.places
        if a_at >= 0:
            values[a_at] = a_ptr
            values[b_at] = b_ptr
            values[out_at] = out_ptr
        if bias is not None and bias_at >= 0:
            values[bias_at] = bias.data_ptr()
        if scratch is not None:
            if partial_at >= 0:
                values[partial_at] = scratch[0].data_ptr()
            if arrivals_at >= 0:
                values[arrivals_at] = scratch[1].data_ptr()
        if base := found.base:
            found.launcher(*base[:STREAM], stream, *base[STREAM + 1 :], values)
        else:
            values[STREAM] = stream
            found.launcher(*values)

    def _arguments(self, a: Tensor, b: Tensor, out: Tensor, *others: Any) -> dict[str, Any]:
        if self._repack is None:  # else they are matrices already
            a, b, out = self._matrices(a, b, out)
        return self._plan.arguments(a, b, out, *others)

    def _record(self, key: _Key, a: Tensor, b: Tensor, out: Tensor) -> Recording | None:
        """Return what Triton passes to its C launcher; None if it launches in an unknown way."""
        _make_context()
        if not self._may_record:
            return None
        # A tensor descriptor holds an address, and takes microseconds to make.
        by_address = "a_ptr" not in self._kernel.names
        _, *addresses = key  # and not the operands, so that none is kept alive
        arguments = self._arguments(a, b, out) | dict(zip(_POINTERS, addresses))
        open_names = (_NONE if by_address else _POINTERS) + _OTHERS
        try:
            found = self._kernel.record(self._plan.blocks, arguments, open_names)
        except LookupError as error:
            log.info("Triton's own wrappers launch %s: %s", self.config, error)
            self._may_record = False
            return None
        if by_address:
            with _lock:
                _recordings[key] = found
                drop_oldest(_recordings, ROOM)
        else:
            self._recording = found
        return found


def _make_context() -> None:
    """Give this thread a CUDA context on the current device; safe in a capture.

    A thread that has done nothing on a device yet has no context there, and the driver then makes
    no tensor map. Triton's launcher makes the context itself, but only after the maps.
    """
    torch.cuda.is_current_stream_capturing()  # any call of CUDA's runtime makes one


def workspace_of(index: int, stream: int) -> Workspace:
    """Return the workspace of a stream.

    A captured launch gets its own: a graph may be replayed on any stream, at any time, and the
    memory has to stay where it was.
    """
    if torch.cuda.is_current_stream_capturing():
        return Workspace(torch.device("cuda", index), counters=_counters.get(index))
    found = _workspaces.get((index, stream))
    if found is None:
        device = torch.device("cuda", index)
        counters = _counters.setdefault(index, Counters(device))
        made = Workspace(device, apart=True, counters=counters)
        found = _workspaces.setdefault((index, stream), made)
    return found


_POINTERS, _NONE = ("a_ptr", "b_ptr", "c_ptr"), ("", "", "")
_OTHERS = ("bias_ptr", "partial_ptr", "arrivals_ptr")

_workspaces: dict[tuple[int, int], Workspace] = {}
_counters: dict[int, Counters] = {}
_ids = itertools.count()
_copying = Lock()
_lock = Lock()
_recordings: dict[_Key, Recording] = {}
ROOM = 2**15
"""The most recordings by address of all launches, about 2 KiB each: operands may keep moving."""


# --- by torch -------------------------------------------------------------------------------------


class TorchLaunch:
    """The product by ``torch.mm`` (cuBLAS), where torch was chosen or a size is 0.

    Attributes:
        config: None, since torch has no configuration.
        result: the choice that this launch follows, a ``TuningResult``; None without a choice.
    """

    config: GemmConfig | None = None

    def __init__(self, activation: str, result: Any = None, tf32: bool = False):
        self.result = result
        self._activation, self._tf32 = activation, tf32

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: MaybeTensor) -> None:
        """Queue it on the current stream of the operands' device."""
        torch_product(a, b, out, bias, self._activation, self._tf32)

    def multiplied(self, a: Tensor, b: Tensor, bias: MaybeTensor) -> Tensor:
        """Return act(a @ b + bias) as torch does, which takes less host time than writing to out.

        Args:
            a, b: as in ``torch.matmul``, with any batch dimensions.
        """
        is_float32 = a.dtype is torch.float32
        if is_float32 or is_autocasting():
            precision = float32_precision(self._tf32) if is_float32 else nullcontext()
            with without_autocast(a), precision:
                return self._multiplied(a, b, bias)
        return self._multiplied(a, b, bias)

    def _multiplied(self, a: Tensor, b: Tensor, bias: MaybeTensor) -> Tensor:
        if b.ndim > 2:
            product = torch.matmul(a, b)
            return activated(product if bias is None else product + bias, self._activation)
        product = torch.matmul(a, b) if bias is None else functional.linear(a, b.mT, bias)
        return activated_rows(product, self._activation)


def torch_product(
    a: Tensor, b: Tensor, out: Tensor, bias: MaybeTensor, activation: str, tf32: bool = False
) -> None:
    """Queue out = act(a @ b + bias) by ``torch.mm`` (cuBLAS), as fast as torch can.

    Args:
        a: [m, k]; b: [k, n]; out: [m, n], float32 or of the type of a and b.
        bias: [n] of the type of ``out``, or None.
        tf32: multiply float32 operands in TF32, else in IEEE, whatever torch's switch is.
    """
    if a.dtype is torch.float32:
        with float32_precision(tf32):
            _product(a, b, out, bias)
    elif out.dtype is a.dtype:
        _product(a, b, out, bias)
    elif a.is_cuda and a.numel() and b.numel():
        _product(a, b, out, bias, out_dtype=out.dtype)  # 16-bit to float32, not rounded in between
    else:  # only cuBLAS widens its result, and not an empty one
        _product(a.float(), b.float(), out, bias)
    if activation == "gelu":
        out.copy_(functional.gelu(out))
    elif activation != "none":
        getattr(functional, activation)(out, inplace=True)


is_autocasting = torch._C._is_any_autocast_enabled
"""Returns True if ``torch.autocast`` is on for any kind of device."""


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off on the device of a tensor."""
    # Made only if it is needed: it takes microseconds.
    return torch.autocast(x.device.type, enabled=False) if is_autocasting() else nullcontext()


def activated(x: Tensor, activation: str) -> Tensor:
    """Return act(x) by torch, in a new tensor unless the activation is ``none``."""
    return x if activation == "none" else getattr(functional, activation)(x)


def activated_rows(x: Tensor, activation: str) -> Tensor:
    """Return act(x); autograd saves a matrix of all rows, as the first call of a batch does."""
    if x.ndim == 2 or activation == "none":
        return activated(x, activation)
    return activated(x.reshape(prod(x.shape[:-1]), x.shape[-1]), activation).view(x.shape)


def torch_multiplies_in_tf32() -> bool:
    """Return True if torch's own switch sets float32 products on a GPU to TF32.

    ``allow_tf32`` and ``set_float32_matmul_precision`` set the same switch, and may not be read
    once the newer name was used. If a product has changed the switch, this waits for its end.
    """
    with _switching:
        return _C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


@contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Have torch multiply float32 in TF32 or IEEE inside; restore its switch afterwards.

    The switch belongs to the process: it also affects float32 products that other threads queue
    meanwhile. So it is changed only if it differs. Other threads may also read it by its old names
    meanwhile: if these could be read before, they are changed with it.
    """
    with _switching:
        if torch_multiplies_in_tf32() != tf32:
            old = _by_old_names()
            if (old == "highest") != tf32:
                old = None  # it contradicts the switch, and may not be read
            before = {x: _own_precision(x) for x in (("cuda", "mkldnn") if old else ("cuda",))}
            if old is None:
                _C._set_fp32_precision_setter("cuda", "matmul", "tf32" if tf32 else "ieee")
            elif tf32:
                _C._set_cublas_allow_tf32(True)  # and products on the CPU stay as they are
            else:
                _C._set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                if old:
                    _C._set_float32_matmul_precision(old)
                for backend, precision in before.items():
                    _C._set_fp32_precision_setter(backend, "matmul", precision)
            return
    yield


def _own_precision(backend: str) -> str:
    """Return the own setting of a switch for products: ``none`` where it follows its parents.

    Torch returns only the setting that holds in the end. If that of a parent is the same, the
    parents are set to ``none`` for an instant, from the top down: then each of them, and the
    switch, returns its own setting.
    """
    read, write = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    own = read(backend, "matmul")
    if own == read(backend, "all"):
        parents = {}
        for parent in ("generic", backend):
            parents[parent] = read(parent, "all")
            write(parent, "all", "none")
        own = read(backend, "matmul")
        for parent, precision in parents.items():
            write(parent, "all", precision)
    return own


def _by_old_names() -> str | None:
    """Return the setting by torch's old names; None if the new ones contradict them."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it reads the CPU's switch, too
        pass
    try:
        if not _C._get_cublas_allow_tf32():
            return "highest"
    except RuntimeError:
        return None
    return "high" if _C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16" else "medium"


_switching = RLock()


def _product(a: Tensor, b: Tensor, out: Tensor, bias: MaybeTensor, **widened: Any) -> None:
    if bias is None:
        torch.mm(a, b, out=out, **widened)
    else:
        torch.addmm(bias, a, b, out=out, **widened)


def reference_product(a: Tensor, b: Tensor, bias: MaybeTensor, activation: str) -> Tensor:
    """Return act(A @ B + bias) in IEEE float32, whatever torch's switch for TF32 says."""
    with float32_precision(tf32=False):
        product = a.float() @ b.float()
    if bias is not None:
        product += bias.float()
    return activated(product, activation)


Launch = TorchLaunch | TritonLaunch
