"""The arguments of a kernel: which tensors it may write, and copies that undo what it wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch
from triton._C.libtriton import ir

from costmodel.compile.ttir import parse_module

_ANY = -1
"""Origin of a pointer that may point anywhere, such as one that was loaded from memory."""
_WRITTEN, _ESCAPED = -2, -3
"""Where pointers go that are written through, and those with which anything may be done."""
_STORES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store",
           "tt.descriptor_reduce", "tt.descriptor_scatter"}  # fmt: skip
"""Operations that write through their first operand."""
_LOADS = {"tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.print"}
"""Operations that take a pointer and neither write through it nor pass it on."""
_MOVES = {"tt.addptr", "tt.advance", "tt.bitcast", "tt.broadcast", "tt.expand_dims", "tt.join",
          "tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.reshape", "tt.splat", "tt.split",
          "tt.trans"}  # fmt: skip
"""Operations whose results point where their operands do; `arith` and `ub` are all so."""
_REGIONS = ("scf.", "tt.reduce", "tt.scan", "tt.map_elementwise")
"""Operations whose regions and results get their last operands, and what the regions end with."""

RELATIVE_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,  # many kernels round to 16 bits before they sum
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}
"""How far results of two right candidates may lie apart; other floats have few bits: 0.25."""


class _Module:
    """The functions of a TTIR module, and what they may do with pointers."""

    def __init__(self, ttir: str) -> None:
        context = ir.context()
        ir.load_dialects(context)
        self._module = parse_module(ttir, context)
        self._operations: dict[str, list[Any]] = {}  # by function
        # Of each region: its blocks' arguments, and the operands of what ends its blocks.
        self._arguments: dict[int, dict[int, list[int]]] = {}
        self._ends: dict[int, list[list[int]]] = {}
        self._walked: list[Any] = []
        self._module.walk(self._visit)
        self.entry: str = self._module.get_entry_func_name()
        self.effects = cache(self._effects)

    def _visit(self, operation: Any) -> None:
        """Note an operation, of which those inside were noted before."""
        name, block = operation.get_name(), operation.get_block()
        if name == "tt.func":
            self._operations[operation.get_str_attr("sym_name")] = self._walked
            self._walked = []
        elif block is not None:
            self._walked.append(operation)
            region, count = block.get_parent().id(), block.get_num_arguments()
            blocks = self._arguments.setdefault(region, {})
            blocks[block.id()] = [block.arg(i).id() for i in range(count)]
            if name.endswith(("yield", "condition", "return")):
                self._ends.setdefault(region, []).append(_operands(operation))

    def pointers(self, name: str) -> list[int]:
        """Return which arguments of a function are pointers or descriptors."""
        function = self._module.get_function(name)
        return [i for i in range(function.get_num_args()) if _is_pointer(function.args(i))]

    def _effects(self, name: str) -> tuple[set[int], list[set[int]]]:
        """Return the arguments that a function may write, and those that its results may be."""
        function = self._module.get_function(name)
        origins: dict[int, set[int]] = defaultdict(set, {_ANY: {_ANY}})
        origins |= {function.args(i).id(): {i} for i in self.pointers(name)}
        moves = [move for operation in self._operations[name] for move in self._moves(operation)]
        changed = True
        while changed:
            changed = False
            for to, value in moves:
                changed |= not origins[value] <= origins[to]
                origins[to] |= origins[value]
        written = origins[_WRITTEN]
        if origins[_ESCAPED] or not all(origins[value] for to, value in moves if to == _WRITTEN):
            written.add(_ANY)
        returned = zip(*self._ends[function.get_region(0).id()], strict=True)
        return written, [set().union(*(origins[value] for value in each)) for each in returned]

    def _moves(self, operation: Any) -> Iterator[tuple[int, int]]:
        """Give where an operation's pointers go, and where they come from."""
        name, operands = operation.get_name(), _operands(operation)
        values = [operation.get_result(i) for i in range(operation.get_num_results())]
        results = [value.id() for value in values]
        if name == "tt.call":
            written, returned = self.effects(operation.get_flat_symbol_ref_attr("callee"))
            for to, numbers in ((_WRITTEN, written), *zip(results, returned, strict=True)):
                yield from ((to, _ANY if i == _ANY else operands[i]) for i in numbers)
        elif name in _STORES:
            yield _WRITTEN, operands[0]
        elif name in _MOVES or name.startswith(("arith.", "ub.")):
            yield from product(results, operands)
        elif name.startswith("cf."):  # to one of these blocks, or to two
            for arguments in self._arguments[operation.get_block().get_parent().id()].values():
                if name != "cf.br":
                    yield from product(arguments, operands)
                elif len(arguments) == len(operands):
                    yield from zip(arguments, operands, strict=True)
        elif name.startswith(_REGIONS):
            sources, targets = [operands], [results]
            for i in range(operation.get_num_regions()):
                region = operation.get_region(i).id()
                sources += self._ends.get(region, ())
                targets += self._arguments.get(region, {}).values()
            for to, source in product(targets, sources):
                yield from zip(reversed(to), reversed(source), strict=False)
        elif not name.endswith("return"):
            yield from ((value.id(), _ANY) for value in values if _is_pointer(value))
            if name not in _LOADS:
                yield from product([_ESCAPED], operands)
            if operation.get_bool_attr("pure") is False:
                yield _WRITTEN, _ANY  # assembly or a library, given an address as a number


def _operands(operation: Any) -> list[int]:
    return [operation.get_operand(i).id() for i in range(operation.get_num_operands())]


def _is_pointer(value: Any) -> bool:
    return "!tt." in str(value.get_type())


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Give a value by its name; the parts of a tuple as `name[0]`, `name[1]` and so on."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _parts(part, f"{path}[{i}]")
    else:
        yield path, value


def written(ttir: str, signature: Mapping[str, object]) -> frozenset[str] | None:
    """Find the arguments that a kernel may write, from its raw TTIR and its signature.

    `signature` is that of Triton's `ASTSource`. Parts of tuples are named `name[0]` and so on.
    None means that the kernel may write any argument, and memory that no argument shows: it
    writes through a pointer that it loaded or made from a number, or does with a pointer what is
    not known here, or is no TTIR (Gluon).
    """
    if not ttir or "ttg." in ttir:
        return None
    try:
        module = _Module(ttir)
    except RuntimeError:
        return None
    names = [
        path
        for name, kind in signature.items()
        for path, part in _parts(kind, name)
        if str(part).startswith(("*", "tensordesc", "nvTmaDesc"))
    ]
    places = module.pointers(module.entry)
    may_write, _ = module.effects(module.entry)
    if _ANY in may_write or len(places) != len(names):
        return None
    return frozenset(name for i, name in zip(places, names, strict=True) if i in may_write)


def tensors_of(
    args: Mapping[str, object], names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Find the tensors among a call's arguments: plain, in tuples, descriptors and wrappers.

    Args:
        args: all arguments by name.
        names: of which arguments, as `written` names them; None: of all.

    An object with a `data_ptr` that hides its tensor is left out.
    """
    found = {}
    for name, value in args.items():
        for path, part in _parts(value, name):
            while not isinstance(part, torch.Tensor) and hasattr(part, "base"):
                part = part.base  # of a TensorDescriptor or a TensorWrapper
            if isinstance(part, torch.Tensor) and (names is None or name in names or path in names):
                found[path] = part
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor spans: from, to."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    stop = start + last + 1 if tensor.numel() else start
    return int(start * tensor.itemsize), int(stop * tensor.itemsize)


def _bytes(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """View bytes of a storage; autograd does not see what is written through the view."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, start, (stop - start,), (1,))


class Snapshot:
    """Copies of tensors, to undo what a kernel wrote and to compare what two kernels wrote.

    What the tensors span in their storages is copied, once where they overlap. If a copy does
    not fit, `torch.OutOfMemoryError` is raised and nothing is kept.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {path: tensor.detach() for path, tensor in tensors.items()}
        spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
        for path, tensor in self.tensors.items():
            key = tensor.device, tensor.untyped_storage().data_ptr()
            spans.setdefault(key, []).append((*_extent(tensor), path))
        # Of each tensor: the copy that holds it, and where in its storage the copy begins.
        self._copy_of: dict[str, tuple[torch.Tensor, int]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parts in spans.values():
            self._copy(sorted(parts, key=lambda part: part[:2]))

    def _copy(self, parts: list[tuple[int, int, str]]) -> None:
        """Copy the parts of one storage, in order of their beginnings."""
        while parts:
            start, stop = parts[0][:2]
            paths = []
            while parts and parts[0][0] <= stop:
                stop = max(stop, parts[0][1])
                paths.append(parts.pop(0)[2])
            original = _bytes(self.tensors[paths[0]].untyped_storage(), start, stop)
            # Elements of every size keep their alignment, which is 16 at most.
            shift = start % 16
            copy = original.new_empty(shift + stop - start)
            self._copies.append((original, copy[shift:].copy_(original)))
            self._copy_of.update(dict.fromkeys(paths, (copy, start - shift)))

    def restore(self) -> None:
        """Put back what the tensors held."""
        for original, copy in self._copies:
            original.copy_(copy)

    def _saved(self, path: str) -> torch.Tensor:
        """View a tensor's copy as the tensor was."""
        tensor = self.tensors[path]
        copy, start = self._copy_of[path]
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = tensor.storage_offset() - start // tensor.itemsize
        return view.set_(copy.untyped_storage(), offset, tensor.shape, tensor.stride())

    def differs_from(self, other: Snapshot | None = None) -> str:
        """Say which tensors differ from another snapshot's, or from what they hold now.

        Empty if all agree: integers exactly, floats within RELATIVE_TOLERANCE, and NaN with NaN.
        """
        found = []
        for path, tensor in self.tensors.items():
            now = tensor if other is None else other._saved(path)
            if difference := _difference(self._saved(path), now):
                found.append(f"{path}: {difference}")
        return "; ".join(found)


def _difference(old: torch.Tensor, new: torch.Tensor) -> str:
    """Say how much two tensors of one shape and dtype differ; empty if they agree."""
    if old.is_complex():
        old, new = torch.view_as_real(old), torch.view_as_real(new)
    if not old.is_floating_point():
        wrong = old != new
        return f"{int(wrong.sum())} of {old.numel()} elements differ" if wrong.any() else ""
    tolerance = RELATIVE_TOLERANCE.get(old.dtype, 0.25)
    wide = torch.float64 if old.dtype == torch.float64 else torch.float32
    a, b = old.to(wide), new.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return ""
    apart = (a - b).abs()
    # A sum's error is relative to what was summed, not to a result that happens to be near 0.
    # The median, since parts that no kernel writes may hold numbers of any size.
    typical = a.abs()[a.isfinite() & (a != 0)].median()
    close = apart.isfinite() & (apart <= tolerance * (a.abs() + typical))
    wrong = ~(same | close)
    if not wrong.any():
        return ""
    return (
        f"{int(wrong.sum())} of {old.numel()} elements differ by more than a relative "
        f"{tolerance:g}, at most by {float(apart[wrong].max()):.3g}"
    )
