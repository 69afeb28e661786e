"""The arguments of a kernel: which tensors it may write, and copies that undo what it wrote."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor
from triton._C.libtriton import ir, passes

from costmodel.compile.ttir import parse_module

# Origin of a pointer that may point anywhere, such as one that was loaded from memory.
_ANY = -1
# Where pointers go that the kernel writes through, and pointers that it may use in any way.
_WRITTEN, _ESCAPED = -2, -3
# Operations that write through their first operand.
_STORES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store",
           "tt.descriptor_reduce", "tt.descriptor_scatter"}  # fmt: skip
# Operations that take a pointer and neither write through it nor pass it on.
_LOADS = {"tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.print"}
_MOVING = """tt.addptr tt.advance tt.bitcast tt.broadcast tt.expand_dims tt.join tt.make_tensor_ptr
tt.make_tensor_descriptor tt.reshape tt.splat tt.split tt.trans"""
# Operations whose results point where their operands do, as do those of all `arith` and `ub`.
_MOVES = {*_MOVING.split()}
# Operations that pass their last operands, and the operands at the end of their regions, to their
# regions and results.
_REGIONS = ("scf.", "tt.reduce", "tt.scan", "tt.map_elementwise")

RELATIVE_TOLERANCE = {8: 1e-6, 4: 1e-2, 2: 2e-2, 1: 0.25}
"""Relative difference that results of two correct candidates may have, by the bytes of a float.

Many kernels round to 16 bits before they sum.
"""


def _pointers(ttir: str) -> tuple[list[int], set[int]]:
    """Return the numbers of a kernel's pointer arguments, and of those that it may write."""
    context = ir.context()
    ir.load_dialects(context)
    module = parse_module(ttir.replace("noinline = true", "noinline = false"), context)
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    manager.run(module, "written")
    walked: list[Any] = []
    module.walk(walked.append)  # what is inside an operation comes before it
    operations = [x for x in walked[:-1] if x.get_name() != "tt.func"]
    # For each region: the arguments of its blocks, and the operands at the ends of its blocks.
    blocks: dict[int, Any] = defaultdict(dict)
    ends = defaultdict(list)
    for operation in operations:
        block = operation.get_block()
        region, count = block.get_parent().id(), block.get_num_arguments()
        blocks[region][block.id()] = [block.arg(i).id() for i in range(count)]
        if operation.get_name().endswith(("yield", "condition", "return")):
            ends[region].append(_operands(operation))
    moves = [move for operation in operations for move in _moves(operation, blocks, ends)]
    function = module.get_function(module.get_entry_func_name())
    arguments = [function.args(i) for i in range(function.get_num_args())]
    pointers = {i: value.id() for i, value in enumerate(arguments) if _is_pointer(value)}
    origins = defaultdict(set, {_ANY: {_ANY}})
    origins |= {value: {i} for i, value in pointers.items()}
    changed = True
    while changed:
        changed = False
        for to, value in moves:
            changed |= not origins[value] <= origins[to]
            origins[to] |= origins[value]
    written = origins[_WRITTEN]
    if origins[_ESCAPED] or not all(origins[value] for to, value in moves if to == _WRITTEN):
        written.add(_ANY)
    return list(pointers), written


def _moves(
    operation: Any, blocks: dict[int, Any], ends: dict[int, Any]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of values: an operation moves the pointer in the second to the first."""
    name, operands = operation.get_name(), _operands(operation)
    values = [operation.get_result(i) for i in range(operation.get_num_results())]
    results = [value.id() for value in values]
    if name in _STORES:
        yield _WRITTEN, operands[0]
    elif name in _MOVES or name.startswith(("arith.", "ub.")):
        yield from product(results, operands)
    elif name.startswith("cf."):  # a branch to one or two of these blocks
        for arguments in blocks[operation.get_block().get_parent().id()].values():
            if name != "cf.br":
                yield from product(arguments, operands)
            elif len(arguments) == len(operands):
                yield from zip(arguments, operands)
    elif name.startswith(_REGIONS):
        sources, targets = [operands], [results]
        for i in range(operation.get_num_regions()):
            region = operation.get_region(i).id()
            sources += ends[region]
            targets += blocks[region].values()
        for to, source in product(targets, sources):
            yield from zip(reversed(to), reversed(source), strict=False)
    elif not name.endswith("return"):
        yield from ((value.id(), _ANY) for value in values if _is_pointer(value))
        if name not in _LOADS:
            yield from product([_ESCAPED], operands)
        if operation.get_bool_attr("pure") is False:
            yield _WRITTEN, _ANY  # assembly or a library may get an address as a number


def _operands(operation: Any) -> list[int]:
    return [operation.get_operand(i).id() for i in range(operation.get_num_operands())]


def _is_pointer(value: Any) -> bool:
    return "!tt." in str(value.get_type())


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield a value with its name; the parts of a tuple as `name[0]`, `name[1]` and so on."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _parts(part, f"{path}[{i}]")
    else:
        yield path, value


def written(ttir: str, signature: Mapping[str, object]) -> frozenset[str] | None:
    """Find the arguments that a kernel may write, from its raw TTIR and its signature.

    `signature` is that of Triton's `ASTSource`. Parts of tuples are named `name[0]` and so on.
    None means that the kernel may write any argument, and also memory that is in no argument: it
    writes through a pointer that it loaded or made from a number, or it uses a pointer in a way
    that is not known here, or it is no TTIR (Gluon).
    """
    if not ttir or "ttg." in ttir:
        return None
    try:
        pointers, may_write = _pointers(ttir)
    except RuntimeError:
        return None
    names = [
        path
        for name, kind in signature.items()
        for path, part in _parts(kind, name)
        if str(part).startswith(("*", "tensordesc", "nvTmaDesc"))
    ]
    if _ANY in may_write or len(pointers) != len(names):
        return None
    return frozenset(name for i, name in zip(pointers, names) if i in may_write)


def tensors_of(
    args: Mapping[str, object], names: Container[str] | None = None
) -> dict[str, Tensor]:
    """Find the tensors among a call's arguments: plain, in tuples, descriptors and wrappers.

    Args:
        args: all arguments by name.
        names: arguments to look at, named as by `written`; None: all.

    An object that has a `data_ptr` but hides its tensor is left out.
    """
    found = {}
    for name, value in args.items():
        for path, part in _parts(value, name):
            while not isinstance(part, Tensor) and hasattr(part, "base"):
                part = part.base  # of a TensorDescriptor or a TensorWrapper
            if isinstance(part, Tensor) and (names is None or name in names or path in names):
                found[path] = part
    return found


def span(tensor: Tensor) -> Tensor:
    """View a tensor's storage as bytes, uint8 [n], from its first element to its last.

    Autograd does not see writes through the view.
    """
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    count = (last + 1) * tensor.itemsize if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.itemsize
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (count,), (1,))


class Snapshot:
    """Copies of tensors, to undo what a kernel wrote and to compare what two kernels wrote.

    A copy holds the part of the storage that the tensor spans. If a copy does not fit,
    `torch.OutOfMemoryError` is raised and nothing is kept.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = {path: tensor.detach() for path, tensor in tensors.items()}
        self._copies = {path: span(tensor).clone() for path, tensor in self.tensors.items()}

    def restore(self) -> None:
        """Put back what the tensors held."""
        for path, tensor in self.tensors.items():
            span(tensor).copy_(self._copies[path])

    def _saved(self, path: str) -> Tensor:
        """View a tensor's copy with the shape, type and strides of the tensor."""
        tensor = self.tensors[path]
        return self._copies[path].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def differs_from(self, other: Self) -> str:
        """Say which tensors differ in another snapshot of them, and by how much; empty if none.

        Integers agree if they are equal, floats within RELATIVE_TOLERANCE, and NaN with NaN.
        """
        both = [path for path in self.tensors if path in other.tensors]
        found = {path: _difference(self._saved(path), other._saved(path)) for path in both}
        return "; ".join(f"{path}: {said}" for path, said in found.items() if said)


def _difference(old: Tensor, new: Tensor) -> str:
    """Say how much two tensors of one shape and dtype differ; empty if they agree."""
    if old.is_complex():
        old, new = torch.view_as_real(old), torch.view_as_real(new)
    wide = torch.float64 if old.dtype == torch.float64 else torch.float32
    a, b = old.to(wide), new.to(wide)
    if old.is_floating_point():
        tolerance = RELATIVE_TOLERANCE[old.dtype.itemsize]
        # A sum's error is relative to its terms, not to a result that happens to be near 0. The
        # median is taken, since parts that no kernel writes may hold numbers of any size.
        sizes = a.abs()[a.isfinite() & (a != 0)]
        typical = float(sizes.median()) if len(sizes) else 0.0
        wrong = ~torch.isclose(b, a, tolerance, tolerance * typical, equal_nan=True)
        limit = f" by more than a relative {tolerance:g}"
    else:
        wrong, limit = old != new, ""
    if not wrong.any():
        return ""
    most = float((a - b)[wrong].abs().max())
    return f"{int(wrong.sum())} of {old.numel()} elements differ{limit}, at most by {most:.3g}"
