"""Triton's own launch, recorded once and repeated with other addresses (Triton 3.7 to 3.9).

There one C function launches all kernels. Triton's wrappers work out its arguments anew at each
call, which takes as long again. Here they do so once, with marks in place of the addresses: what
they would have passed on is kept, and the marks in it are replaced at each call. A launch that is
not what is expected is left to the wrappers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from costmodel.launch.launch import Kernel, Plan, make_context
from costmodel.support.bounded import SharedRoom

if TYPE_CHECKING:
    import torch

__all__ = ["ROOM_OF_ADDRESSES", "RecordedLaunch"]

# Of all launches together: there may be thousands, each on operands that keep moving.
ROOM_OF_ADDRESSES = SharedRoom(2**15)
"""For what depends on the addresses of operands, about 2 KiB each."""


_TRITONS = ("3.7.", "3.8.", "3.9.")  # whose wrappers were read
_STREAM = 3  # place among the arguments
_STREAM_MARK = 0x5EED
_POINTERS = ("a_ptr", "b_ptr", "c_ptr")
_FREE = (*_POINTERS, "bias_ptr", "partial_ptr", "arrivals_ptr")


class _Mark:
    """Stands for an address."""


class _Recording:
    """Arguments of the C function; ``places`` of the addresses among the kernel's own."""

    def __init__(self, base: tuple[Any, ...], kernel: list[Any], places: dict[str, int]) -> None:
        self.base, self.kernel, self.places = base, kernel, places


class RecordedLaunch:
    """The launches of one kernel on operands of one kind.

    A tensor descriptor depends on the address, so there the last recordings are kept by address.
    """

    def __init__(self, plan: Plan, kernel: Kernel, launcher: Callable[..., None]) -> None:
        self._plan, self._kernel, self._launcher = plan, kernel, launcher
        self._by_address = "a_ptr" not in kernel.names
        self._kept: dict[tuple[int, int, int], _Recording] = {}

    @classmethod
    def of(cls, plan: Plan, kernel: Kernel) -> RecordedLaunch | None:
        """None where this Triton is not known to launch in this way."""
        import triton

        run: Any = kernel.run
        try:
            if not triton.__version__.startswith(_TRITONS) or not hasattr(run, "arg_annotations"):
                return None
            if run.global_scratch_size or run.profile_scratch_size:
                return None
            if getattr(run, "gsan_enabled", False):
                return None
            return cls(plan, kernel, _c_function(run.launch))
        except (AttributeError, KeyError, TypeError):
            return None

    def __call__(
        self,
        stream: int,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scratch: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Queue it on a raw stream.

        Raises:
            LookupError: Triton's wrappers did not do what was expected, and nothing was queued.
        """
        a, b, out = operands
        pointers = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        key = pointers if self._by_address else (0, 0, 0)
        found = self._kept.get(key)
        if found is None:
            found = self._record(operands)
            if self._by_address:
                ROOM_OF_ADDRESSES.put(self._kept, key, found)
            else:
                self._kept[key] = found
        arguments, places = found.kernel.copy(), found.places
        for name, address in zip(_POINTERS, pointers, strict=True):
            if name in places:
                arguments[places[name]] = address
        if "bias_ptr" in places:
            arguments[places["bias_ptr"]] = None if bias is None else bias.data_ptr()
        if "partial_ptr" in places:
            partial, arrivals = (None, None) if scratch is None else scratch
            arguments[places["partial_ptr"]] = None if partial is None else partial.data_ptr()
            arguments[places["arrivals_ptr"]] = None if arrivals is None else arrivals.data_ptr()
        base = found.base
        self._launcher(*base[:_STREAM], stream, *base[_STREAM + 1 :], arguments)

    def _record(self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> _Recording:
        """What Triton would launch; it is let believe that it does."""
        kernel, blocks = self._kernel, self._plan.blocks
        marks = {name: _Mark() for name in _FREE if name in kernel.names}
        values = self._plan.numbers(*operands) | self._plan.descriptors(*operands) | marks
        caught: list[tuple[Any, ...]] = []
        make_context()
        run: Any = copy.copy(kernel.run)
        run.launch = _with_function(run.launch, lambda *arguments: caught.append(arguments))
        run(
            blocks, 1, 1, _STREAM_MARK, kernel.function, kernel.metadata, None, None, None,
            *(values.get(name) for name in kernel.names),
        )  # fmt: skip
        if len(caught) != 1 or caught[0][: _STREAM + 1] != (blocks, 1, 1, _STREAM_MARK):
            raise LookupError(f"an unknown launch: {caught!r:.200}")
        *base, last = caught[0]
        places = {
            name: place
            for name, mark in marks.items()
            for place, value in enumerate(last)
            if value is mark
        }
        if places.keys() != marks.keys() or _STREAM_MARK in base[_STREAM + 1 :]:
            raise LookupError(f"an unknown launch: {caught!r:.200}")
        return _Recording(tuple(base), list(last), places)


def _c_function(launch: Any) -> Callable[..., None]:
    """What Triton's wrapper calls in the end; the function itself where there is no wrapper."""
    if not isinstance(launch, FunctionType):
        return launch  # type: ignore[no-any-return]
    found: Callable[..., None] = _cells(launch)["launcher"].cell_contents
    return found


def _with_function(launch: Any, function: Callable[..., None]) -> Callable[..., None]:
    """The wrapper, with another function to call in the end."""
    if not isinstance(launch, FunctionType):
        return function
    cells = _cells(launch) | {"launcher": CellType(function)}
    closure = tuple(cells[name] for name in launch.__code__.co_freevars)
    return FunctionType(launch.__code__, launch.__globals__, closure=closure)


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
