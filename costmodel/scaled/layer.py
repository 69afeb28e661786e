"""``costmodel.nn.ScaledLinear``: fp8 or int8 weights with their scales, as in checkpoints."""

from typing import Any

import torch
from torch import Tensor

from costmodel.errors import InvalidInput, ShapeError
from costmodel.gemm.workload import require_activation
from costmodel.scaled.configs import BY_BLOCK, BY_ROW, ROW, STEP
from costmodel.scaled.product import EIGHT_BITS, scaled_mm

_SCALE_NAMES = {"row": "weight_scale", "block": "weight_scale_inv"}


def quantize(x: Tensor, scales: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """Return x [m, k] in 8 bits, and scales [m, 1] (``row``) or [m, k / 128] (``block``).

    The largest magnitude in a row, or in each 128 numbers of it, becomes the largest of the type.
    """
    largest = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    width = STEP if scales == "block" else x.shape[1]
    parts = torch.unflatten(x.float(), 1, (-1, width))
    scale = parts.abs().amax(2).clamp(min=1e-12) / largest
    small = parts / scale.unsqueeze(2)
    small = (small.round() if dtype == torch.int8 else small).to(dtype).flatten(1)
    return small, scale.T.contiguous().T  # as torch wants the scales of blocks


class ScaledLinear(torch.nn.Module):
    """act(x @ (weight * scale).T + bias) for inference: x is quantised at each call.

    The state dict is that of checkpoints: ``weight`` [n, k], ``bias`` [n], and the scales as
    ``weight_scale`` [n, 1] or [n] (``row``: compressed-tensors, vLLM) or as ``weight_scale_inv``
    [n / 128, k / 128] (``block``: DeepSeek-V3). Casts, as of ``half()``, are of the bias alone.

    Args:
        scales: ``row`` or ``block``; int8 has ``row`` only.
        dtype: of the weight: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        activation: fused into the product: ``relu``, ``gelu`` or ``silu``.

    Raises:
        InvalidInput: other scales, types or activations, or ``block`` with int8 or with features
            that 128 does not divide.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, scales: str = "block",
        dtype: torch.dtype = torch.float8_e4m3fn, activation: str | None = None, device: Any = None,
    ):  # fmt: skip
        super().__init__()
        if scales not in _SCALE_NAMES or dtype not in EIGHT_BITS:
            raise InvalidInput(
                f"scales={scales!r}, dtype={dtype}: expected row or block, and float8_e4m3fn, "
                f"float8_e5m2 or int8"
            )
        if scales == "block" and (in_features % STEP or dtype == torch.int8):
            raise InvalidInput(
                f"in_features={in_features}, {dtype}: blocks are of fp8 and a multiple of {STEP}"
            )
        require_activation(activation or "none")
        self.scales, self.activation = scales, activation
        shape = [out_features, 1]
        if scales == "block":
            shape = [-(-out_features // STEP), in_features // STEP]
        weight = torch.zeros(out_features, in_features, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(weight, False)
        scale = torch.ones(shape, dtype=torch.float32, device=device)
        self.register_parameter(_SCALE_NAMES[scales], torch.nn.Parameter(scale, False))
        self.bias = None
        if bias:
            zeros = torch.zeros(out_features, dtype=torch.bfloat16, device=device)
            self.bias = torch.nn.Parameter(zeros, False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def moved(x: Tensor) -> Tensor:
            y: Tensor = fn(x)
            return y if x is self.bias or y.dtype == x.dtype else x.to(y.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        name, expected = prefix + _SCALE_NAMES[self.scales], self.weight.dtype
        found = state_dict.get(f"{prefix}weight", self.weight).dtype
        if found != expected:  # other numbers, once cast
            others[-1].append(f"{prefix}weight is {found}: expected {expected}, give it as dtype=")
            return
        if name in state_dict:
            scale = state_dict[name].float()  # some are bfloat16, and of rows some [n]
            state_dict[name] = scale.reshape(-1, 1) if self.scales == "row" else scale
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n] in the type of x [..., k]."""
        k = self.weight.shape[1]
        if x.shape[-1:] != (k,):
            raise ShapeError(f"x is {list(x.shape)}: expected [..., {k}]")
        small, scale = quantize(x.reshape(-1, k), self.scales, self.weight.dtype)
        recipes = (BY_ROW, BY_BLOCK) if self.scales == "block" else (ROW, ROW)
        scale_b = self.get_parameter(_SCALE_NAMES[self.scales]).T
        out = scaled_mm(
            small, self.weight.T, scale, recipes[0], scale_b, recipes[1], bias=self.bias,
            output_dtype=x.dtype, activation=self.activation,
        )  # fmt: skip
        return out.view(*x.shape[:-1], len(self.weight))
