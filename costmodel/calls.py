"""One call of ``matmul``, and the launches that are kept for the next ones like it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from costmodel.candidates import CostModel
from costmodel.models.storage import CARD
from costmodel.outputs import NewOutput
from costmodel.prepared import Launch
from costmodel.ranks import epoch

__all__ = ["Call", "KeptLaunches", "ModelLike", "key_of"]

ModelLike = CostModel | str | PathLike[str] | None
_Kept = tuple[Launch, tuple[int, ...], NewOutput]


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of :func:`costmodel.matmul`, as they came."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str | None = None
    tf32: bool | None = None
    out_dtype: torch.dtype | None = None
    mode: str | None = None
    model: ModelLike = None

    def options(self) -> dict[str, Any]:
        """All but the operands and ``out``."""
        return {
            "bias": self.bias, "activation": self.activation, "tf32": self.tf32,
            "out_dtype": self.out_dtype, "mode": self.mode, "model": self.model,
        }  # fmt: skip


def key_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
    model: ModelLike,
) -> Any:
    """All that a prepared launch depends on, as cheap to compute as it can be.

    Whether there is a gradient to lose is in it: such a call never gets past its validation.
    """
    try:
        return (
            a.shape, a.stride(), a.dtype, a.get_device(), a.data_ptr() & 15,
            b.shape, b.stride(), b.dtype, b.get_device(), b.data_ptr() & 15,
            (a.requires_grad or b.requires_grad) and torch.is_grad_enabled(),
            None if out is None else _described(out),
            None if bias is None else _described(bias),
            activation, tf32, out_dtype, mode, model if model is None else _identity(model),
            epoch(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no dense tensors: the validation says what they are


def _described(x: torch.Tensor) -> Any:
    wants_grad = x.requires_grad and torch.is_grad_enabled()
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, wants_grad


def _identity(model: ModelLike) -> Any:
    """A model is compared by identity, a directory by its name and when it was last saved."""
    if not isinstance(model, str | PathLike):
        return model
    path = os.path.join(model, CARD)
    return path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0


class KeptLaunches:
    """Launches by key, with the bytes that their operands span and what makes an output: a bounded
    number of them.

    There are two generations. What is put goes to the young one; when that is full it becomes the
    old one, whose predecessor is dropped: no call ever waits for a clean-up. What is used of the
    old generation becomes young again, so what is in use stays.

    Attributes:
        young: for the one look-up of a call that is known; :meth:`get` for all others.
    """

    def __init__(self, at_most: int = 4096) -> None:
        self.young: dict[Any, _Kept] = {}
        self._old: dict[Any, _Kept] = {}
        self._generation = at_most // 2
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def get(self, key: Any) -> _Kept | None:
        """What is kept of a key, young again; None if nothing is."""
        with self._lock:
            found = self.young.get(key)
            if found is None and (found := self._old.pop(key, None)) is not None:
                self._put(key, found)
            return found

    def put(self, key: Any, launch: _Kept) -> None:
        with self._lock:
            self._put(key, launch)

    def _put(self, key: Any, launch: _Kept) -> None:
        if len(self.young) >= self._generation:
            self._old, self.young = self.young, {}
        self.young[key] = launch

    def discard(self, keys: Iterable[Any]) -> None:
        """Forget these, if they are kept."""
        with self._lock:
            for key in keys:
                self.young.pop(key, None)
                self._old.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self.young, self._old = {}, {}
