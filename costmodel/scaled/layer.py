"""``costmodel.nn.ScaledLinear``: fp8 or int8 weights with their scales, as in checkpoints."""

from typing import Any

import torch
from torch import Tensor

from costmodel.errors import InvalidInput
from costmodel.scaled.configs import BY_BLOCK, BY_ROW, ROW, STEP
from costmodel.scaled.product import scaled_mm

_SCALE_NAMES = {"row": "weight_scale", "block": "weight_scale_inv"}


def quantize(x: Tensor, scales: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """Return x [m, k] in 8 bits, and scales [m, 1] (``row``) or [m, k / 128] (``block``).

    The largest magnitude in a row, or in each 128 numbers of it, becomes the largest of the type.
    """
    largest = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    width = STEP if scales == "block" else x.shape[1]
    parts = x.float().reshape(len(x), x.shape[1] // width, width)
    scale = parts.abs().amax(2, keepdim=True).clamp(min=1e-12) / largest
    small = parts / scale
    small = (small.round() if dtype == torch.int8 else small).to(dtype).view(x.shape)
    return small, scale.squeeze(2).T.contiguous().T  # as torch wants the scales of blocks


class ScaledLinear(torch.nn.Module):
    """act(x @ (weight * scale).T + bias) for inference: x is quantised at each call.

    The state dict is that of checkpoints: ``weight`` [n, k], ``bias`` [n], and the scales as
    ``weight_scale`` [n, 1] or [n] (``row``: compressed-tensors, vLLM) or as ``weight_scale_inv``
    [n / 128, k / 128] (``block``: DeepSeek-V3).

    Args:
        scales: ``row`` or ``block``; int8 has ``row`` only.
        dtype: of the weight: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        activation: fused into the product: ``relu``, ``gelu`` or ``silu``.

    Raises:
        InvalidInput: other scales, or ``block`` with int8 or with features that 128 does not
            divide.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, scales: str = "block",
        dtype: torch.dtype = torch.float8_e4m3fn, activation: str | None = None, device: Any = None,
    ):  # fmt: skip
        super().__init__()
        if scales not in _SCALE_NAMES:
            raise InvalidInput(f"scales={scales!r}: expected row or block")
        if scales == "block" and (in_features % STEP or dtype == torch.int8):
            raise InvalidInput(
                f"in_features={in_features}, {dtype}: blocks are of fp8 and a multiple of {STEP}"
            )
        self.scales, self.activation = scales, activation
        shape = [out_features, 1]
        if scales == "block":
            shape = [-(-out_features // STEP), in_features // STEP]
        weight = torch.zeros(out_features, in_features, device=device).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        scale = torch.nn.Parameter(torch.ones(shape, device=device), requires_grad=False)
        self.register_parameter(_SCALE_NAMES[scales], scale)
        self.bias = None
        if bias:
            zeros = torch.zeros(out_features, dtype=torch.bfloat16, device=device)
            self.bias = torch.nn.Parameter(zeros, requires_grad=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        name = prefix + _SCALE_NAMES["row"]
        if self.scales == "row" and name in state_dict:
            state_dict[name] = state_dict[name].reshape(-1, 1)  # some have [n]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n] in the type of x [..., k]."""
        small, scale = quantize(x.reshape(-1, x.shape[-1]), self.scales, self.weight.dtype)
        recipes = (BY_ROW, BY_BLOCK) if self.scales == "block" else (ROW, ROW)
        scale_b = self.get_parameter(_SCALE_NAMES[self.scales]).T
        out = scaled_mm(
            small, self.weight.T, scale, recipes[0], scale_b, recipes[1], bias=self.bias,
            output_dtype=x.dtype, activation=self.activation,
        )  # fmt: skip
        return out.view(*x.shape[:-1], len(self.weight))
