"""The machine: a device and the toolchain that compiles for it.

``Target.current()`` asks the driver; named devices work without one. All that is NVIDIA's is in
:mod:`costmodel.hardware.nvidia`.
"""

import functools
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Self

from costmodel.errors import InvalidInput, NoGpu, UnknownTarget, host_errors
from costmodel.files import Named, decode
from costmodel.hardware import nvidia
from costmodel.hardware.architectures import Architecture, architecture
from costmodel.hardware.installed import compiler_settings, driver_version, triton_build
from costmodel.validation import closest


@dataclass(frozen=True)
class Device:
    """A kind of GPU. Two cards of one kind share their models and their data.

    Attributes:
        name: short name, also the folder of its datasets and models (``h100-sxm``).
        product: what the driver calls it (``NVIDIA H100 80GB HBM3``).
        arch: compute capability times ten (90); see :attr:`architecture`.
        sm_count: streaming multiprocessors.
        shared_bytes: shared memory that one block may ask for.
        sm_shared_bytes: shared memory of one multiprocessor.
        l2_bytes: size of the L2 cache.
        clock_mhz: the highest SM clock.
        bandwidth_gbs: device memory, GB/s by the data sheet.
        tflops: dense 16-bit tensor-core TFLOP/s by the data sheet.
        memory_bytes: device memory.
    """

    name: str
    product: str
    arch: int
    sm_count: int
    shared_bytes: int
    sm_shared_bytes: int
    l2_bytes: int
    clock_mhz: int
    bandwidth_gbs: float
    tflops: float
    memory_bytes: int

    @property
    def capability(self) -> str:
        return f"sm_{self.arch}"

    @property
    def architecture(self) -> Architecture:
        """The row of its generation."""
        return architecture(self.arch)

    def is_sibling(self, other: Self) -> bool:
        """True if they differ in clocks and memory only: what runs on one runs on the other.

        As H100 and H200 do: the same binaries, the same space, another bandwidth.
        """
        figures = attrgetter("arch", "sm_count", "shared_bytes", "sm_shared_bytes")
        return bool(figures(self) == figures(other))

    def tflops_of(self, kind: str) -> float:
        """TFLOP/s of a kind of operand by the data sheet (``costmodel.gemm.dtypes``).

        A kind that no tensor core multiplies uses the FMA units: one multiply-add per unit and
        clock.
        """
        rate = self.architecture.tensor_rates.get(kind)
        if rate is None:
            return 2 * self.architecture.fma_units * self.sm_count * self.clock_mhz / 1e6
        return self.tflops * rate

    def roofline_us(self, flops: int, bytes_: int, kind: str = "float16") -> float:
        """The least time by the data sheet, in us: the larger of arithmetic and traffic, or 0.1."""
        arithmetic_us = flops / self.tflops_of(kind) / 1e6
        return max(arithmetic_us, bytes_ / self.bandwidth_gbs / 1e3, 0.1)


_MIB, _GIB = 2**20, 2**30
_DEVICES = (
    Device("a100-sxm", "NVIDIA A100-SXM4-80GB", 80, 108, 166912, 167936, 40 * _MIB,
           1410, 2039.0, 312.0, 80 * _GIB),
    Device("h100-sxm", "NVIDIA H100 80GB HBM3", 90, 132, 232448, 233472, 50 * _MIB,
           1980, 3350.0, 989.0, 80 * _GIB),
    Device("h100-pcie", "NVIDIA H100 PCIe", 90, 114, 232448, 233472, 50 * _MIB,
           1755, 2039.0, 756.0, 80 * _GIB),
    Device("h200-sxm", "NVIDIA H200", 90, 132, 232448, 233472, 60 * _MIB,
           1980, 4800.0, 989.0, 141 * _GIB),
    Device("b200-sxm", "NVIDIA B200", 100, 148, 232448, 233472, 126 * _MIB,
           1965, 8000.0, 2250.0, 180 * _GIB),
)  # fmt: skip
DEVICES = {d.name: d for d in _DEVICES}
"""Devices that work without a driver. Figures: NVIDIA's data sheets and CUDA's occupancy tables."""


def known_device(product: str, sm_count: int) -> Device | None:
    """Return the device in :data:`DEVICES` to which the driver gives this name and SM count."""
    same = (d for d in DEVICES.values() if (d.product, d.sm_count) == (product, sm_count))
    return next(same, None)


@dataclass(frozen=True)
class Toolchain:
    """The compiler: other versions, and other settings, give other binaries.

    Attributes:
        triton, ptxas: their versions, such as ``"3.6.0"`` and ``"12.8"``; settings that change code
            follow the version of ptxas, as in ``"12.8 DISABLE_PTXAS_OPT=1"``.
    """

    triton: str
    ptxas: str

    @classmethod
    def current(cls, arch: int = 90) -> Self:
        """The installed Triton and its ptxas, as they are set now."""
        import triton

        with host_errors():
            version = nvidia.ptxas_version(arch)
        changed = [f"{k}={v}" for k, v in sorted(compiler_settings().items()) if v is not None]
        return cls(triton.__version__, " ".join((version, *changed)))


@dataclass(frozen=True)
class Target:
    """A device and a toolchain: what a measurement or a binary belongs to.

    Attributes:
        device: the kind of GPU, with its data sheet; ``device.name`` is its short name.
        toolchain: the Triton and the ptxas that compile for it.
    """

    device: Device
    toolchain: Toolchain

    @classmethod
    def named(cls, name: str, toolchain: Toolchain | None = None) -> Self:
        """A target by the short name of its device; asks no driver.

        Raises:
            UnknownTarget: no such name; the message lists those there are.
        """
        device = DEVICES.get(name) if isinstance(name, str) else None
        if device is None:
            raise UnknownTarget(
                f"unknown target {name!r}{closest(str(name), DEVICES)}: expected one of "
                f"{', '.join(DEVICES)}; on the machine "
                f"itself, leave the name out and the driver is asked"
            )
        return cls(device, toolchain or Toolchain.current(device.arch))

    @classmethod
    def current(cls, index: int | None = None) -> "Target":
        """The target of CUDA device ``index`` (default: torch's current one).

        Raises:
            NoGpu: torch sees no NVIDIA GPU.
        """
        import torch

        if not nvidia.is_usable():
            raise NoGpu(
                "no usable NVIDIA GPU: torch.cuda.is_available() is False; compile, rank, "
                "evaluate, tune --replay, collect --plan and collect --replay DIR work without "
                "one (`costmodel doctor` says what lacks)"
            )
        device = _probe(torch.cuda.current_device() if index is None else index)
        return Target(device, Toolchain.current(device.arch))

    def here(self) -> Named:
        """Return what timings on this machine depend on, for a key on disk."""
        device, toolchain = self.device, self.toolchain
        return {
            "device": device.product, "arch": device.arch, "sm_count": device.sm_count,
            "driver": driver_version(), "triton": toolchain.triton, "triton_build": triton_build(),
            "ptxas": toolchain.ptxas,
        }  # fmt: skip

    def to_dict(self) -> Named:
        return {"device": asdict(self.device), "toolchain": asdict(self.toolchain)}

    @classmethod
    def from_dict(cls, data: Named) -> Self:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: a field is missing or of another type, or a figure is not over 0.
        """
        try:
            target = decode(data, cls)
        except InvalidInput as error:
            raise InvalidInput(f"not a target: {error}") from None
        target.check_figures()
        return target

    def check_figures(self) -> None:
        """Refuse a device that cannot exist.

        Raises:
            InvalidInput: a figure is not over 0.
        """
        for name, value in asdict(self.device).items():
            if not isinstance(value, str) and value <= 0:
                raise InvalidInput(f"not a target: {name}={value!r}: expected a figure over 0")


@functools.cache
def _probe(index: int) -> Device:
    facts = nvidia.facts(index)
    return known_device(facts["product"], facts["sm_count"]) or Device(**facts)
