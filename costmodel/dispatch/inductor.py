"""Inductor's lowering of the operator: to torch's own product, where that is the better choice.

A graph that Inductor compiles pays the operator's host time at each call. Torch's own product costs
less there, and its neighbours can be fused with it. Inductor's cache of graphs keeps the choice.
"""

import sys
from typing import Any

import torch

from costmodel.dispatch.check import Call
from costmodel.dispatch.dispatch import launch_of
from costmodel.dispatch.gradients import is_gain

_LOWERING = "torch._inductor.lowering"
# Host time of torch's product and of the operator in a compiled graph, in us, on an H200's host.
_HOST_US = 8.0, 60.0
_DEVICES = ("cuda",)


def lower_operator() -> None:
    """Tell Inductor how to lower the operator, if this process has imported Inductor.

    Importing Inductor here would take seconds.
    """
    lowering: Any = sys.modules.get(_LOWERING)
    operator = torch.ops.costmodel.matmul.default
    # Another thread may still be importing the module: then it lacks names.
    if lowering is None or lowering.__spec__._initializing or operator in lowering.lowerings:
        return
    by_operator = lowering.fallback_handler(operator)

    def lower(*arguments: Any) -> Any:
        a, b, bias, *_ = arguments
        if not _is_torchs():
            return by_operator(*arguments)
        aten = torch.ops.aten
        if bias is None:
            return lowering.lowerings[aten.mm.default](a, b)
        return lowering.lowerings[aten.addmm.default](bias, a, b)

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def _is_torchs() -> bool:
    """Return True if torch is to compute the operator that Inductor lowers; tune if need be."""
    from torch._inductor import config
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    values: list[Any] = [getattr(x, "meta", {}).get("val", x) for x in V.graph.current_node.args]
    a, b, bias, activation, tf32, out_dtype, mode = values
    given = [x for x in (a, b, bias) if x is not None]
    sizes = [size for x in given for size in (*x.shape, *x.stride())]
    is_plain = activation == "none" and tf32 is None and out_dtype in (None, a.dtype)
    if (
        not is_plain
        or a.device.type not in _DEVICES
        or not all(type(size) is int for size in sizes)
    ):
        return False
    with unset_fake_temporarily(), torch.no_grad():
        blank = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given
        ]
        launch = launch_of(Call(blank[0], blank[1], bias=blank[2] if bias is not None else None,
                                mode=mode))  # fmt: skip
    if launch.config is None:
        return True
    return not config.triton.cudagraphs and not is_gain(launch.result, _HOST_US)
