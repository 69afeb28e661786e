"""One file for each kernel family, and the list of the families there are.

A family is all that the host knows of one kernel: an instance of a subclass of
:class:`costmodel.gemm.family.KernelFamily`.
"""

import functools
import os
import re
from importlib import import_module
from typing import Any

from costmodel.errors import InvalidInput

FAMILIES = [
    "costmodel.gemm.kernels.pointer",
    "costmodel.gemm.kernels.tma",
    "costmodel.gemm.kernels.tma_persistent",
    "costmodel.gemm.kernels.warp_specialized",
]
"""One line registers a family: its module, which defines ``FAMILY``. The grid has this order."""

NAME = r"[a-z_][a-z_0-9]*"
"""Names of kernels: only these can be read back from the text of a configuration."""

VARIABLE = "COSTMODEL_KERNELS"
"""Environment variable that names modules of more families, separated by commas.

Set it before the first family is asked for. Children that compile or time inherit it.
"""


@functools.cache
def known() -> dict[str, Any]:
    """Return the families by name. They are imported when the first is asked for.

    Raises:
        InvalidInput: the variable names what is no family, or a family whose name is taken.
    """
    found = {family.name: family for family in map(_family_of, FAMILIES)}
    for module in re.findall(r"[^,\s]+", os.environ.get(VARIABLE, "")):
        try:
            family = _family_of(module)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise InvalidInput(f"{VARIABLE} names {module}: expected a family ({error})") from error
        if found.setdefault(family.name, family) is not family:
            raise InvalidInput(f"{VARIABLE}: {module} has a kernel {family.name}, as another has")
    return found


def _family_of(module: str) -> Any:
    family = import_module(module).FAMILY
    if isinstance(family, type) or not re.fullmatch(NAME, family.name):
        raise InvalidInput(
            f"FAMILY of {module}: expected an instance of a family, with a name of a-z, 0-9 and _, "
            f"found {family!r:.80} with the name {family.name!r:.40}"
        )
    return family
