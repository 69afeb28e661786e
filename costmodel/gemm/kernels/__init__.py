"""One file for each kernel family, and the list of the families there are.

A family is all that the host knows of one kernel: a subclass of
:class:`costmodel.gemm.family.KernelFamily`.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from costmodel.errors import InvalidInput

__all__ = ["FAMILIES", "known", "register"]

FAMILIES = [
    "costmodel.gemm.kernels.pointer",
    "costmodel.gemm.kernels.tma",
    "costmodel.gemm.kernels.tma_persistent",
    "costmodel.gemm.kernels.warp_specialized",
]
"""One line registers a family: its module, which has it as ``FAMILY``; in the order of the grid."""


@functools.cache
def known() -> dict[str, Any]:
    """Return the families by name. They are imported when the first is asked for."""
    found = [import_module(module).FAMILY for module in FAMILIES]
    return {family.name: family for family in found}


def register(family: Any) -> None:
    """Add a family of the user's own, before anything asks for the grid.

    Raises:
        InvalidInput: another family has its name.
    """
    if known().setdefault(family.name, family) is not family:
        raise InvalidInput(f"kernel family {family.name!r} exists: expected another name")
