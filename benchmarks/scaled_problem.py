"""A product of 8-bit operands to time: how it is made, and how far a result of it is off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from costmodel.scaled.product import int_call, scaled_call


@dataclass(frozen=True)
class Scaled:
    """A product to time: the problem of a ``costmodel.measure.session.Session``."""

    form: str
    m: int
    n: int
    k: int
    device: str = "cuda"

    precision = "bfloat16"

    @property
    def has_bfloat16(self) -> bool:
        """True where torch computes no such product."""
        return (self.form == "block" and self.m == 1) or (self.is_int and self.m <= 16)

    @property
    def is_int(self) -> bool:
        return self.form.startswith("int")

    @property
    def terms(self) -> int:
        return self.k

    @property
    def set_bytes(self) -> int:
        operands = (self.m + self.n) * self.k * (3 if self.has_bfloat16 else 1)
        return operands + 8 * self.m * self.n

    @property
    def check_bytes(self) -> int:
        return 8 * (self.m + self.n) * self.k + 8 * self.m * self.n

    def operands(self, draw: Any, count: int) -> list[Any]:
        """Return so many sets: the arguments of a launch, and bfloat16 operands or None."""
        return [self._set() for _ in range(count)]

    def _set(self) -> tuple[tuple[Any, ...], Any]:
        a, b = self._matrix(self.m), self._matrix(self.n)
        wide = (a.bfloat16(), b.bfloat16().T) if self.has_bfloat16 else None
        if self.form == "int32":
            return int_call(a, b.T), wide
        scales = self._scales()
        recipe = {"tensor": (0, 0), "block": (4, 5)}.get(self.form, (1, 1))
        fast = self.form == "row_fast"
        return scaled_call(a, b.T, scales[0], recipe[0], scales[1], recipe[1], fast=fast), wide

    def _matrix(self, rows: int) -> torch.Tensor:
        if self.is_int:
            shape = (rows, self.k)
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device)
        values = torch.randn(rows, self.k, device=self.device, dtype=torch.bfloat16)
        return values.to(torch.float8_e4m3fn)

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw scales in the layouts that torch asks for."""
        blocks = -(-self.k // 128)
        if self.form == "tensor":
            return self._uniform(1), self._uniform(1)
        if self.form == "block":
            padded = -(-blocks // 4) * 4
            return self._uniform(blocks, self.m).T, self._uniform(-(-self.n // 128), padded).T
        return self._uniform(self.m, 1), self._uniform(1, self.n)

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device) + 0.5

    def output(self, operands: Any) -> torch.Tensor:
        return operands[0][5]  # type: ignore[no-any-return]

    def reference(self, operands: Any) -> torch.Tensor:
        """Return a placeholder: what is timed here is checked beforehand, by :func:`error_of`."""
        return torch.zeros(1, device=self.device)


def error_of(problem: Scaled, call: tuple[Any, ...]) -> float:
    """Return the error against float32 of the dequantised operands, over the largest element.

    Only some rows are checked: the others are the same work.
    """
    a, b, sa, sb, out = *call[:4], call[5]
    rows = torch.linspace(0, problem.m - 1, min(problem.m, 64)).long().to(a.device)
    left = a.view(torch.uint8)[rows].view(a.dtype).float()  # torch cannot index fp8 everywhere
    right = b.float()
    if problem.form == "block":
        left *= sa[rows].repeat_interleave(128, 1)[:, : problem.k]
        wide = sb.T.repeat_interleave(128, 0)[: problem.n]
        right *= wide.repeat_interleave(128, 1)[:, : problem.k]
    elif sa is not None:
        left *= sa[rows] if sa.numel() > 1 else sa
        right *= sb.T if sb.numel() > 1 else sb
    exact = left.double() @ right.T.double() if problem.is_int else left @ right.T
    return float((out[rows].double() - exact).abs().max() / exact.abs().max())
