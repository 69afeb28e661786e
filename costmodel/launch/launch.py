"""From a configuration to a running kernel: grid, arguments, loading, launching.

The only module that touches Triton's loader and launcher.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from costmodel.compile.binaries import MakeSource, compiled, recalled
from costmodel.errors import LaunchError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.kernel_code import kernel_function
from costmodel.gemm.space import launch_blocks, repack_elements, workspace_bytes
from costmodel.gemm.specialize import (
    Specialization,
    artifact_key,
    descriptor_blocks,
    source,
    specialize,
)
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.support.host import host_errors

if TYPE_CHECKING:
    import torch

__all__ = ["Kernel", "Plan", "Workspace", "interpret", "load", "load_source", "make_context"]


class Workspace:
    """Scratch memory of one stream: split-K's partial sums and arrival counters, aligned copies.

    It grows and is kept, so that a launch allocates nothing. Launches on one stream may share it;
    two streams may not.

    Args:
        apart: out of reach of a pool that the calling thread allocates from at the time, such as
            one of CUDA graphs (``torch.cuda.use_mem_pool``): what is kept is not of its results.
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._scratch: tuple[tuple[torch.Tensor, torch.Tensor] | None, int, int] = (None, 0, 0)

    def get(self, size_bytes: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [size_bytes / 4] of anything, and int32 [tiles] of zeros; or more."""
        scratch, most_bytes, most_tiles = self._scratch
        if scratch is not None and size_bytes <= most_bytes and tiles <= most_tiles:
            return scratch
        import torch

        partial = self._at_least("partial", size_bytes // 4, torch.float32)
        scratch = partial, self._at_least("arrivals", tiles, torch.int32)
        # Every launch asks, so what was found is kept apart.
        self._scratch = scratch, 4 * scratch[0].numel(), scratch[1].numel()
        return scratch

    def copy_of(self, name: str, x: torch.Tensor, code_layout: str, elements: int) -> torch.Tensor:
        """A matrix like ``x`` with aligned rows, or columns for a ``col`` layout.

        Args:
            name: which operand: each has a place of its own.
            elements: its size with the padding, from :func:`costmodel.gemm.space.repack_elements`.
        """
        memory = self._at_least(name, elements, x.dtype)[:elements]
        rows, cols = x.shape
        if code_layout == "col":
            return memory.view(cols, -1)[:, :rows].T
        return memory.view(rows, -1)[:, :cols]

    def _at_least(self, name: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        key = name, dtype
        found = self._memory.get(key)
        if found is None or found.numel() < elements:
            make = partial(torch.zeros, elements, dtype=dtype, device=self._device)
            found = _in_another_thread(make, self._device) if self._apart else make()
            self._memory[key] = found
        return found


def _in_another_thread(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What is made on this thread's stream, from no pool of this thread: pools are a thread's."""
    import torch

    stream = torch.cuda.current_stream(device)
    made: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(make())
        except BaseException as error:  # out of memory: the caller's
            errors.append(error)

    thread = threading.Thread(target=run, name="costmodel-allocate")
    try:
        thread.start()
    except RuntimeError:  # this process may have no more threads
        return make()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch of one configuration on one workload; addresses are filled in at each call.

    Attributes:
        workload, config, spec: what is launched, and which binary it takes.
        blocks: number of programs.
        tiles: tiles of C (the arrival counters of split-K).
        workspace_bytes: memory for split-K partial sums.
        repacked: elements of the aligned copies of A and of B; 0 where none is made.
    """

    workload: Workload
    config: GemmConfig
    spec: Specialization
    blocks: int
    tiles: int
    workspace_bytes: int
    repacked: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload, config: GemmConfig, sm_count: int) -> Plan:
        """Work out the launch; m and n must not be 0."""
        m, n = workload.m, workload.n
        return cls(
            workload,
            config,
            specialize(workload, config),
            launch_blocks(config, m, n, sm_count),
            -(-m // config.block_m) * -(-n // config.block_n),
            workspace_bytes(config, m, n),
            repack_elements(workload) if config.repack else (0, 0),
        )

    def aligned(
        self, a: torch.Tensor, b: torch.Tensor, workspace: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands that the kernel addresses: A and B, or the places of their copies."""
        code, (a_size, b_size) = self.workload.code, self.repacked
        return (
            workspace.copy_of("a", a, code.a_layout, a_size) if a_size else a,
            workspace.copy_of("b", b, code.b_layout, b_size) if b_size else b,
        )

    def arguments(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> dict[str, Any]:
        """The kernel's run-time arguments by name; what the binary bakes in is left out.

        Args:
            a, b: as :meth:`aligned` gave them.
        """
        values = self.numbers(a, b, out) | self.descriptors(a, b, out)
        values |= {"a_ptr": a, "b_ptr": b, "c_ptr": out, "bias_ptr": bias}
        if self.config.split_k > 1:
            owner = workspace or Workspace(out.device)
            partial, arrivals = owner.get(self.workspace_bytes, self.tiles)
            values |= {"partial_ptr": partial, "arrivals_ptr": arrivals}
        return values

    def numbers(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
        """The arguments that are no addresses: they stay while shapes and strides do."""
        w, c = self.workload, self.config
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = map(_used_strides, (a, b, out))
        return {
            "M": w.m, "N": w.n, "K": w.k, "GROUP_M": c.group_m, "SPLIT_K": c.split_k,
            "stride_am": a_m, "stride_ak": a_k, "stride_bk": b_k, "stride_bn": b_n,
            "stride_cm": c_m, "stride_cn": c_n,
        }  # fmt: skip

    def descriptors(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        """The tensor descriptors, by argument name; none for a pointer kernel."""
        code = self.spec.code
        matrices = {
            "a": a if code.a_layout == "row" else a.T,
            "b": b if code.b_layout == "row" else b.T,
            "c": out,
        }
        return {
            name: _descriptor(matrices[name[0]], list(block))
            for name, block in descriptor_blocks(self.spec).items()
        }


def _used_strides(x: torch.Tensor) -> list[int]:
    """Strides; 0 of a single row or column, where it may be any number, and too large for one."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]


def make_context() -> None:
    """Give this thread a CUDA context on the current device, if it has none; safe in a capture.

    A thread that has done nothing on a device yet has none there, and without one the driver makes
    no tensor map. Triton's launcher sees to it itself, but makes the maps before.
    """
    import torch

    torch.cuda.is_current_stream_capturing()  # a question to CUDA's runtime, which makes one


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """A host-side tensor descriptor of a matrix whose last dimension is contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, cols = x.shape
    # The stride of a single row is never used, but the descriptor wants a legal one.
    per_16_bytes = 16 // x.element_size()
    stride = x.stride(0) if rows > 1 else -(-cols // per_16_bytes) * per_16_bytes
    return TensorDescriptor(x, [rows, cols], [stride, 1], block)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A binary loaded on a device.

    Attributes:
        names: its arguments, in order, the baked ones among them.
        run, function, metadata: Triton's launcher, and what it wants of the binary.
        binary: what keeps it on the device: from Triton 3.8 on it is unloaded with its last user.
    """

    names: tuple[str, ...]
    run: Callable[..., None]
    function: int
    metadata: tuple[int, ...]
    binary: object = None

    def __call__(self, blocks: int, stream: int, arguments: dict[str, Any]) -> None:
        """Queue it on a raw stream handle; addresses may be tensors or integers."""
        values = [arguments.get(name) for name in self.names]
        self.run(blocks, 1, 1, stream, self.function, self.metadata, None, None, None, *values)


@functools.lru_cache(maxsize=8192)
def load(
    spec: Specialization, target: Target, device_index: int, *, remember: bool = True
) -> Kernel:
    """Compile (or take from Triton's cache) and load a binary; remembered.

    Args:
        remember: where it lies in Triton's cache, for later processes too; else what is tried
            once would be.

    Raises:
        CompileError: Triton or ptxas refused.
        LaunchError: the device lacks the resources, or the memory for it.
        HostError: no folder to compile in, or no C compiler.
    """
    name, make = spec.config_binary, functools.partial(source, spec)
    key = artifact_key(spec, target) if remember else None
    return load_source(key, make, name, target, device_index)


def load_source(
    key: str | None, make_source: MakeSource, name: object, target: Target, device_index: int
) -> Kernel:
    """As :func:`load`, from what makes a Triton source.

    Args:
        key: to remember it by; None is not to.
        name: for messages.
    """
    import torch
    from triton.runtime.errors import OutOfResources

    with host_errors():
        if key is None:
            kernel = compiled(make_source, name, target)
        else:
            kernel = recalled(key, make_source, name, target)
    with torch.cuda.device(device_index), _loading, host_errors():
        try:
            kernel._init_handles()
        except OutOfResources as error:
            raise LaunchError(f"{name} does not fit the device: {error}") from None
        except RuntimeError as error:  # the driver's; what is wrong with the device is no choice's
            if "out of memory" not in str(error):
                raise
            raise LaunchError(f"{name} cannot be loaded: {error}") from None
    kernel.asm = kernel.kernel = None  # megabytes of text and code, which the device has now
    names = tuple(kernel.src.fn.arg_names)
    return Kernel(names, kernel.run, kernel.function, kernel.packed_metadata, kernel)


# Python gives all C launchers that it loads once more one module, so that what Triton takes from it
# may be what another thread has just loaded.
_loading = threading.Lock()


def interpret(plan: Plan, arguments: dict[str, Any]) -> None:
    """Run a plan's kernel by Triton's interpreter on the CPU (``TRITON_INTERPRET=1``)."""
    from costmodel.gemm.specialize import constants

    fn = kernel_function(plan.spec.kernel)
    baked = constants(plan.spec)
    names = set(fn.arg_names)
    values = {k: v for k, v in arguments.items() if k in names and k not in baked}
    fn[(plan.blocks,)](**values, **{k: v for k, v in baked.items() if k in names})
