"""``torch.nn.Linear`` by :func:`costmodel.matmul`, with the same parameters."""

from __future__ import annotations

from typing import Any

import torch

from costmodel.errors import InvalidInput
from costmodel.gemm.dtypes import element_types
from costmodel.gemm.workload import ACTIVATIONS
from costmodel.torch_ops import matmul
from costmodel.tuning.modes import check_mode

__all__ = ["Linear", "replace_linear"]

_TYPES = [getattr(torch, name) for name in element_types()]

_CALLS = ("forward", "_compiled_call_impl")  # on a layer itself they replace those of its class

torch.fx.wrap("matmul")  # in a graph of torch.fx it is one call, as torch's own product is


class Linear(torch.nn.Linear):
    """act(x @ weight.T + bias): a ``torch.nn.Linear``, with the same state dict.

    Args:
        args, keywords: of ``torch.nn.Linear``.
        activation: fused into the product: ``relu``, ``gelu`` or ``silu``.
        mode: of :func:`costmodel.matmul`; None: the default mode at each call.

    Raises:
        InvalidInput: an unknown activation or mode.
    """

    def __init__(
        self, *args: Any, activation: str | None = None, mode: str | None = None, **keywords: Any
    ) -> None:
        if (activation or "none") not in ACTIVATIONS:
            raise InvalidInput(
                f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )
        if mode is not None:
            check_mode(mode)
        super().__init__(*args, **keywords)
        self.activation, self.mode = activation, mode

    @classmethod
    def of(
        cls, layer: torch.nn.Linear, *, activation: str | None = None, mode: str | None = None
    ) -> Linear:
        """Return a layer that shares the parameters of another one."""
        made = cls(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta",
            activation=activation, mode=mode,
        )  # fmt: skip
        made.weight, made.bias = layer.weight, layer.bias
        for name, value in vars(layer).items():
            # Attributes that a program has added, but nothing that would call the other layer.
            if name not in _CALLS and getattr(value, "__self__", None) is not layer:
                vars(made).setdefault(name, value)
        return made.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        return matmul(x, self.weight.T, bias=self.bias, activation=self.activation, mode=self.mode)


def replace_linear(module: torch.nn.Module, *, mode: str | None = None) -> int:
    """Replace every ``torch.nn.Linear`` inside a module, in place.

    Layers of subclasses stay. So do layers with hooks (old-style weight norm and pruning), a
    ``forward`` of their own, further parameters, buffers or modules, parameters of a subclass such
    as quantised weights, or a dtype without a kernel. Other attributes are taken over.

    Returns:
        how many layers were replaced.

    Raises:
        InvalidInput: ``module`` is no module, or itself a ``torch.nn.Linear``.
    """
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(f"module is a {type(module).__name__}: expected a torch.nn.Module")
    if type(module) is torch.nn.Linear:
        raise InvalidInput(
            "module is itself a Linear, which cannot be replaced in place: take "
            "costmodel.nn.Linear.of(module) instead of it"
        )
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()  # a shared layer comes once for each name
        if type(child) is torch.nn.Linear and _is_plain(child)
    ]
    made = {id(child): Linear.of(child, mode=mode) for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, made[id(child)])  # a shared layer stays shared
    return len(made)


def _is_plain(layer: torch.nn.Linear) -> bool:
    """Return True if a layer has and does only what every ``torch.nn.Linear`` has and does."""
    own = vars(layer)
    if any(own.get(name) for name in _CALLS) or any(own[k] for k in own if k.endswith("_hooks")):
        return False
    if layer._parameters.keys() != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    parameters = [p for p in layer._parameters.values() if p is not None]
    return all(type(p) is torch.nn.Parameter and p.dtype in _TYPES for p in parameters)
