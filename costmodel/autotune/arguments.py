"""The arguments of a kernel: which tensors it may write, and copies that undo what it wrote."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence

import torch

_ANY = -1
"""Origin of a pointer that may point anywhere, such as one that was loaded from memory."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_PARAMETER = re.compile(r"(%[\w$.-]+): (\S+)")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_BRANCH = re.compile(r"(\^bb\d+)\(([^)]*)\)")
_OPERATION = re.compile(r'(?:((?:%[^ ]+, )*%[^ ]+) = )?(\w+\.[\w.]+|"\d+")')
_CALLEE = re.compile(r'@([\w$.-]+|"\d+")')

_STORES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store",
           "tt.descriptor_reduce", "tt.descriptor_scatter"}  # fmt: skip
"""Operations that write through their first operand."""
_LOADS = {"tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.print"}
"""Operations that take a pointer and neither write through it nor pass it on."""
_MOVES = {"tt.addptr", "tt.advance", "tt.bitcast", "tt.broadcast", "tt.expand_dims", "tt.join",
          "tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.reshape", "tt.splat", "tt.split",
          "tt.trans"}  # fmt: skip
"""Operations whose results point where their operands do; `arith` and `ub` are all so."""

RELATIVE_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,  # many kernels round to 16 bits before they sum
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}
"""How far results of two right candidates may lie apart; other floats have few bits: 0.25."""


class _Function:
    """The arguments that one function of a TTIR module may write, and those it returns."""

    def __init__(self, lines: Sequence[str], module: _Module) -> None:
        self.module = module
        self.parameters = _PARAMETER.findall(lines[0])
        self.moves: list[tuple[str, str]] = []  # (to, from)
        self.stores: list[str] = []
        self.opaque: list[str] = []
        self.returned: list[tuple[int, str]] = []
        # A region that follows another may use its names again: the last definition counts.
        self.versions: dict[str, int] = {}
        # Of each open region: where the values go that it yields, and those of its condition.
        self.regions: list[tuple[list[list[str]], list[str]]] = []
        for line in lines[1:]:
            self._read(line)
        self._solve()

    def _read(self, line: str) -> None:
        """Note what one line does with pointers."""
        if line.startswith("^bb"):
            self._block(line)
            return
        depth = len(self.regions)
        if match := _OPERATION.match(line):
            operands = [self._used(value) for value in _VALUE.findall(line, match.end())]
            name = self.module.strings.get(match[2], match[2])
            self._operation(name, self._results(match[1]), operands, line)
        closes, opens = line.startswith("}"), line.endswith("{")
        if closes and not opens and self.regions:
            self.regions.pop()
        elif opens and not closes and len(self.regions) == depth:
            self.regions.append(([], []))

    def _used(self, value: str) -> str:
        """Name a value by its last definition."""
        base, mark, index = value.partition("#")
        return f"{base} {self.versions.get(base, 0)}{mark}{index}"

    def _defined(self, value: str) -> str:
        """Name a value that is defined here."""
        self.versions[value] = self.versions.get(value, 0) + 1
        return self._used(value)

    def _results(self, text: str | None) -> list[str]:
        """Name an operation's results: `%a:2` is used as `%a#0` and `%a#1`."""
        names = []
        for part in text.split(", ") if text else ():
            base, _, count = part.partition(":")
            name = self._defined(base)
            names += [f"{name}#{i}" for i in range(int(count))] if count else [name]
        return names

    def _pairs(self, text: str) -> list[tuple[str, str]]:
        """Name a region's arguments, and what they begin as."""
        return [(self._defined(to), self._used(value)) for to, value in _PAIR.findall(text)]

    def _block(self, line: str) -> None:
        """Connect a block's arguments with the branches to it, or with a loop's condition."""
        label = line[: line.index(":")].split("(")[0]
        forwarded = self.regions[-1][1] if self.regions else []
        for i, (value, _) in enumerate(_PARAMETER.findall(line)):
            name = self._defined(value)
            self.moves += [(name, source) for source in (f"{label} {i}", *forwarded[i : i + 1])]

    def _operation(self, name: str, results: list[str], operands: list[str], line: str) -> None:
        """Note where one operation's pointers come from and go to."""
        if name == "scf.for":
            pairs = self._pairs(line[line.index(name) :])[1:]
            self.moves += pairs
            self.moves += zip(results, (value for _, value in pairs), strict=False)
            self.regions.append(([results, [to for to, _ in pairs]], []))
        elif name == "scf.while":
            pairs = self._pairs(line[line.index(name) :])
            self.moves += pairs
            self.regions.append(([[to for to, _ in pairs]], results))
        elif name == "scf.if":
            self.regions.append(([results], []))
        elif name == "scf.yield" and self.regions:
            for targets in self.regions[-1][0]:
                self.moves += zip(targets, operands, strict=False)
        elif name == "scf.condition" and self.regions:
            self.moves += zip(self.regions[-1][1], operands[1:], strict=False)
        elif name.startswith("cf."):
            for label, values in _BRANCH.findall(line):
                for i, value in enumerate(_VALUE.findall(values)):
                    self.moves.append((f"{label} {i}", self._used(value)))
        elif name == "tt.return":
            self.returned += enumerate(operands)
        elif name == "tt.call":
            self._call(results, operands, line)
        elif name in _STORES:
            self.stores.append(operands[0])
        elif name in _MOVES or name.startswith(("arith.", "ub.")):
            if "arith" not in name or "!tt." in line:  # most of arith is about numbers
                self.moves += [(to, value) for to in results for value in operands]
        elif name not in _LOADS:
            self._unknown(results, operands, line)
        elif line.count("!tt.ptr") > 1:  # the pointer of a pointer
            self.moves += [(to, "") for to in results]

    def _unknown(self, results: list[str], operands: list[str], line: str) -> None:
        """Take it that an operation may write through its operands, and point anywhere."""
        self.opaque += operands
        if "!tt." in line:
            self.moves += [(to, "") for to in results]
        if "pure = false" in line:  # assembly or a library, perhaps given an address as a number
            self.stores.append("")

    def _call(self, results: list[str], operands: list[str], line: str) -> None:
        """Take over what the called function does with its arguments."""
        match = _CALLEE.search(line)
        callee = self.module.function(match[1]) if match else None
        if callee is None:
            self._unknown(results, operands, line)
            return
        names = dict(enumerate(operands)) | {_ANY: ""}
        self.stores += [names[i] for i in callee.written]
        for i, origins in callee.results.items():
            self.moves += [(results[i], names[origin]) for origin in origins]

    def _solve(self) -> None:
        """Follow the pointers until nothing changes."""
        origins = {
            self._used(name): {i}
            for i, (name, kind) in enumerate(self.parameters)
            if "!tt." in kind
        }
        origins[""] = {_ANY}
        changed = True
        while changed:
            changed = False
            for to, value in self.moves:
                new = origins.get(value, set()) - origins.setdefault(to, set())
                changed |= bool(new)
                origins[to] |= new
        self.written: set[int] = set()
        for name in self.stores:
            self.written |= origins.get(name) or {_ANY}
        if any(origins.get(name) for name in self.opaque):
            self.written.add(_ANY)
        self.results: dict[int, set[int]] = {}
        for i, name in self.returned:
            self.results.setdefault(i, set()).update(origins.get(name, set()))


class _Module:
    """The functions of a TTIR module, each analysed when it is first asked for."""

    def __init__(self, ttir: str) -> None:
        # Strings may hold anything, also what looks like code: numbers stand for them.
        self.strings: dict[str, str] = {}
        numbers: dict[str, str] = {}

        def number(match: re.Match[str]) -> str:
            key = numbers.setdefault(match[0], f'"{len(numbers)}"')
            self.strings[key] = match[0][1:-1]
            return key

        self.bodies: dict[str, list[str]] = {}
        self.entry = ""
        body: list[str] = []
        for line in map(str.strip, _STRING.sub(number, ttir).split("\n")):
            if line.startswith("tt.func") and (match := _CALLEE.search(line)):
                body = self.bodies[match[1]] = []
                self.entry = match[1] if "public" in line[: match.start()] else self.entry
            body.append(line)
        self.analysed: dict[str, _Function | None] = {}

    def function(self, name: str) -> _Function | None:
        """Analyse a function; None if it is not in the module or calls itself."""
        if name not in self.analysed:
            self.analysed[name] = None
            if name in self.bodies:
                self.analysed[name] = _Function(self.bodies[name], self)
        return self.analysed[name]


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
    module = _Module(ttir)
    entry = module.function(module.entry)
    if entry is None or "ttg." in ttir or _ANY in entry.written:
        return None
    names = [
        path
        for name, kind in signature.items()
        for path, part in _parts(kind, name)
        if str(part).startswith(("*", "tensordesc", "nvTmaDesc"))
    ]
    places = [i for i, (_, kind) in enumerate(entry.parameters) if kind.startswith("!tt.")]
    if len(places) != len(names):
        return None
    return frozenset(name for i, name in zip(places, names, strict=True) if i in entry.written)


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
