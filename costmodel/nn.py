"""A ``torch.nn.Linear`` that calls :func:`costmodel.matmul`, and a layer with 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from costmodel.dispatch.calls import (
    count_modes,
    in_forward_level,
    in_functorch,
    is_deterministic,
    tracing_state,
)
from costmodel.dispatch.dispatch import entry_for, layers, layers_lock
from costmodel.errors import InvalidInput
from costmodel.gemm.dtypes import element_types
from costmodel.gemm.workload import require_activation
from costmodel.launch.fast import activated_rows, is_autocasting
from costmodel.torch_ops import matmul
from costmodel.tuning.modes import check_mode
from costmodel.tuning.ranks import WORLD, epoch
from costmodel.validation import drop_oldest

if TYPE_CHECKING:
    from costmodel.scaled.layer import ScaledLinear as ScaledLinear

_TYPES = [getattr(torch, name) for name in element_types()]

_CALLS = ("forward", "_compiled_call_impl")  # set on a layer, they replace those of its class

torch.fx.wrap("matmul")  # in a graph of torch.fx it is one call, as torch's own product is


class Linear(torch.nn.Linear):
    """act(x @ weight.T + bias): a ``torch.nn.Linear``, with the same state dict.

    Args:
        args, keywords: passed to ``torch.nn.Linear``.
        activation: fused into the product: ``relu``, ``gelu`` or ``silu``.
        mode: of :func:`costmodel.matmul`; None: the default mode at each call.

    Raises:
        InvalidInput: an unknown activation or mode.
    """

    def __init__(
        self, *args: Any, activation: str | None = None, mode: str | None = None, **keywords: Any
    ):
        require_activation(activation or "none")
        if mode is not None:
            check_mode(mode)
        super().__init__(*args, **keywords)
        self._activation, self._mode = activation, mode
        self.forget_launches()

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
            # Attributes that a program has added, except those that would call the other layer.
            if name not in _CALLS and getattr(value, "__self__", None) is not layer:
                vars(made).setdefault(name, value)
        return made.train(layer.training)

    @property
    def activation(self) -> str | None:
        """The activation that is fused into the product."""
        return self._activation

    @activation.setter
    def activation(self, value: str | None) -> None:
        self._activation = value
        self.forget_launches()

    @property
    def mode(self) -> str | None:
        """The mode of :func:`costmodel.matmul`; None is the default one."""
        return self._mode

    @mode.setter
    def mode(self, value: str | None) -> None:
        self._mode = value
        self.forget_launches()

    def forget_launches(self) -> None:
        """Look the launches up again at the next calls."""
        self._launches: dict[Any, Any] = {}
        # Elements of the last input that torch computes best, without and with gradients.
        self._torchs = [-1, -1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_launches": {}, "_torchs": [-1, -1]}  # valid in this process only

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        if _is_compiling() or type(x) is not Tensor or tracing_state() is not None:
            return self._multiplied(x, self.weight, self.bias)
        # Torch's product takes 10 us of host time, so this checks only what is needed to tell a
        # layer's inputs apart.
        size, with_gradients = x.numel(), _is_grad_enabled()
        if size == self._torchs[with_gradients] and WORLD._default_pg is None:
            return _linear(x, self.weight, self.bias)
        weight, bias = self.weight, self.bias  # read once: a parametrized weight is computed
        wants_grad = with_gradients and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        key = size, wants_grad, epoch()
        found = self._launches.get(key)
        if found is _BY_TORCH:  # torch takes any operands, so nothing more is checked
            if self._activation is not None:
                return activated_rows(_linear(x, weight, bias), self._activation)
            if wants_grad == with_gradients:
                self._torchs[with_gradients] = size
            return _linear(x, weight, bias)
        if found is None:
            return self._first_call(key, x, weight, bias)
        if not found.fits(x, weight, bias):
            return self._multiplied(x, weight, bias)
        if found.new_output is None:
            return found.launch.multiplied(x, weight, bias)
        out = found.new_output(x)
        found.launch(x, weight, out, bias)
        return out

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Not through the properties: a compiled graph would check them for each layer and call.
        return matmul(x, weight.T, bias=bias, activation=self._activation, mode=self._mode)

    def _first_call(self, key: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with layers_lock:
            layers.add(self)
        kept = self._launches  # taken before the product: `forget_launches` may replace it
        product = self._multiplied(x, weight, bias)
        if (entry := self._entry(x, weight, bias)) is not None:
            kept[key] = entry
            drop_oldest(kept, _AT_MOST)
        return product

    def _entry(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> object:
        """Return how the next calls like this one are computed; None if that may change."""
        if is_deterministic():
            return None
        found = entry_for(x, weight.T, bias=bias, activation=self.activation, mode=self.mode)
        if found is None:
            return None
        launch, _, new_output = found
        if launch.config is None:
            return _BY_TORCH
        # The precision of float32 may be switched; under autocast the operands may be others.
        if launch.config.repack or x.dtype is torch.float32 or is_autocasting():
            return None
        return _Known(launch.of_layer(), new_output, _described(x), _parameters(weight, bias))


_AT_MOST = 1024  # launches of a layer
_BY_TORCH = object()
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_linear = functional.linear


@dataclass(slots=True)
class _Known:
    """A launch of a layer, and the operands that it serves."""

    launch: Any
    new_output: Any
    x: Any
    parameters: Any

    def fits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return True if these operands and torch's switches are those of the launch."""
        rare = count_modes() or tracing_state() is not None or in_forward_level()
        if rare or in_functorch() or is_autocasting() or is_deterministic():
            return False
        try:
            return self.x == _described(x) and self.parameters == _parameters(weight, bias)
        except RuntimeError:  # such as sparse tensors, which the checks refuse
            return False


def _described(x: Tensor) -> Any:
    address = x.data_ptr()  # 0: torch's zeros without memory
    at = address & 15 if address else None
    return x.shape, x.stride(), x.dtype, x.get_device(), at, x.is_neg()


def _parameters(weight: Tensor, bias: Tensor | None) -> Any:
    of_bias = None if bias is None else (type(bias), bias.data_ptr(), bias.dtype, bias.shape)
    return type(weight), weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), of_bias


def replace_linear(module: torch.nn.Module, *, mode: str | None = None) -> int:
    """Replace every ``torch.nn.Linear`` inside a module, in place.

    Layers of subclasses stay. So do layers with hooks (old-style weight norm and pruning), a
    ``forward`` of their own, further parameters, buffers or modules, parameters of a subclass such
    as quantised weights, or a dtype without a kernel. The new layers keep other attributes.

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


def __getattr__(name: str) -> Any:
    if name != "ScaledLinear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from costmodel.scaled.layer import ScaledLinear  # it imports Triton

    return ScaledLinear
