"""A driver of Triton that needs no GPU: kernels bind, compile and "launch", on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class FakeDriver:
    """Stands for the driver of one NVIDIA GPU.

    Attributes:
        launches: (name of the kernel, grid, arguments) of each launch, in order.
        loaded: names of the binaries that were loaded, in order.
    """

    def __init__(self, arch: int = 90) -> None:
        self._target = GPUTarget("cuda", arch, 32)
        self.launches: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]] = []
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448, "warpSize": 32},
            load_binary=self._load,
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            # stream, function, two kinds of metadata, two hooks, then the arguments
            self.launches.append((metadata.name, (x, y, z), rest[6:]))

        return launch

    def _load(self, name: str, *_: object) -> tuple[None, object, int, int, int]:
        self.loaded.append(name)
        return None, object(), 32, 0, 1024  # no module that Triton 3.8 would unload at its end


@contextmanager
def fake_driver(arch: int = 90) -> Iterator[FakeDriver]:
    """Make a fake driver the active one. A kernel keeps what it compiled."""
    before = driver._active  # `reset_active` would ask for a GPU
    fake = FakeDriver(arch)
    driver.set_active(fake)
    try:
        yield fake
    finally:
        driver._active = before
