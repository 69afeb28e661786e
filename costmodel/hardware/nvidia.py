"""Questions to NVIDIA's driver and assembler."""

from typing import Any

from costmodel.hardware.architectures import architecture


def is_usable() -> bool:
    """True if torch was built for CUDA and sees a GPU."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def ptxas_version(arch: int) -> str:
    """The version of Triton's assembler for an architecture: Triton starts it once."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).version)


def facts(index: int) -> dict[str, Any]:
    """The fields of :class:`costmodel.hardware.target.Device` as the driver reports them.

    Rates are not those of a data sheet: they are worked out from clocks, bus and architecture.
    """
    import torch

    props: Any = torch.cuda.get_device_properties(index)
    arch = props.major * 10 + props.minor
    clock_mhz = getattr(props, "clock_rate", 1_500_000) // 1000
    memory_mhz = getattr(props, "memory_clock_rate", 5_000_000) / 1000
    bus_bytes = getattr(props, "memory_bus_width", 256) / 8
    per_sm = architecture(arch).tensor_flops
    name = "".join(c if c.isalnum() else "-" for c in props.name.lower()).strip("-")
    return {
        "name": name.removeprefix("nvidia-"),
        "product": props.name,
        "arch": arch,
        "sm_count": props.multi_processor_count,
        "shared_bytes": props.shared_memory_per_block_optin,
        "sm_shared_bytes": props.shared_memory_per_multiprocessor,
        "l2_bytes": props.L2_cache_size,
        "clock_mhz": clock_mhz,
        "bandwidth_gbs": 2 * memory_mhz * bus_bytes / 1e3,
        "tflops": props.multi_processor_count * per_sm * clock_mhz / 1e6,
        "memory_bytes": props.total_memory,
    }
