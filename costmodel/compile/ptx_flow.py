"""The flow graph of PTX: basic blocks, and the loops among them.

Loops are found in the graph, not in the order of the text: LLVM may lay out the first half of a
loop behind its second (it does for sm_100), and the wait loops of inline assembly all carry the
same label, each in its own ``{ }`` scope.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from costmodel.errors import InvalidInput

_INSTRUCTION = re.compile(r"(@\S+ )?(\.branchtargets|[a-z][\w.:]*)(.*);")
_NAME = re.compile(r"[\w$%]+")
_CONSTANT = re.compile(r"^mov\.b32 (%\w+), (\d{1,10});$", re.MULTILINE)


@dataclass
class Block:
    """Instructions that run one after the other.

    Attributes:
        opcodes: one for each instruction, with a leading ``@`` where it is guarded.
        is_entry: a function starts here.
        ended: its last instruction leaves it, so the next one starts another block.
        falls: it may run on into the next block of the text.
        targets: names in its branch, labels among them, and the scopes to look them up in.
        successors: indices of the blocks that may run next.
    """

    is_entry: bool = False
    opcodes: list[str] = field(default_factory=list)
    ended: bool = False
    falls: bool = True
    targets: tuple[list[str], tuple[int, ...]] = ([], ())
    successors: list[int] = field(default_factory=list)


def basic_blocks(text: str) -> list[Block]:
    """Split a text of one statement a line into linked basic blocks, of all its functions.

    Raises:
        InvalidInput: no kernel in the text, or one that breaks off.
    """
    blocks: list[Block] = []
    labels: dict[tuple[int, str], int] = {}
    scopes: tuple[int, ...] = ()  # the { } that are open, the innermost first
    opened = 0
    has_kernel = False
    constants = dict(_CONSTANT.findall(text)) if "tcgen05.mma" in text else {}
    for line in text.splitlines():
        if line == "{":
            opened += 1
            if not scopes:
                blocks.append(Block(is_entry=True))
            scopes = (opened, *scopes)
        elif line == "}" and scopes:
            scopes = scopes[1:]
        elif line[0] == "." and not line.startswith(".branchtargets"):
            has_kernel |= ".entry" in line
        elif not scopes:
            raise InvalidInput(f"not PTX: {line[:80]!r} where a directive or kernel was expected")
        elif line[-1] == ":":
            labels[scopes[0], line[:-1].rstrip()] = len(blocks)
            blocks.append(Block())
        else:
            if blocks[-1].ended:
                blocks.append(Block())
            _append(blocks[-1], line, scopes, constants)
    if scopes:
        raise InvalidInput("the PTX breaks off inside a kernel: expected the whole module")
    if not (has_kernel and blocks):
        raise InvalidInput("no kernel in the PTX: expected an .entry and its body")
    _link(blocks, labels)
    return blocks


def _append(block: Block, line: str, scopes: tuple[int, ...], constants: dict[str, str]) -> None:
    """Add the instruction of one line to a block."""
    match = _INSTRUCTION.fullmatch(line)
    if match is None:
        raise InvalidInput(f"not a PTX instruction: {line[:80]!r}; is the text whole?")
    guard, opcode, operands = match.groups()
    if opcode == ".branchtargets":  # the table that a brx names by its label
        block.targets, block.ended, block.falls = (_NAME.findall(operands), scopes), True, False
        return
    base = opcode.partition(".")[0]
    if base in ("bra", "brx"):
        block.targets = (_NAME.findall(operands), scopes)
        block.ended, block.falls = True, guard is not None
    elif base in ("ret", "exit", "trap"):
        block.ended, block.falls = True, guard is not None
    elif opcode.startswith("tcgen05.mma."):
        opcode += _tcgen05_shape(opcode, operands, constants)
    block.opcodes.append("@" + opcode if guard else opcode)


def _tcgen05_shape(opcode: str, operands: str, constants: dict[str, str]) -> str:
    """Return ``.m128n256k16``: tcgen05.mma has its shape in a descriptor, a constant register.

    Empty where the descriptor is not a constant: then the instruction counts, without work.
    Fields as in the PTX ISA, "Instruction descriptor": N/8 in bits 17 to 22, M/16 in 24 to 28.
    """
    kind = re.search(r"kind::(\w+)", opcode)
    names = operands.split(",")
    descriptor = constants.get(names[3].strip()) if len(names) > 3 else None
    if kind is None or descriptor is None:
        return ""
    bits = int(descriptor)
    k = {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(kind[1], 32)
    return f".m{(bits >> 24 & 31) * 16}n{(bits >> 17 & 63) * 8}k{k}"


def _link(blocks: list[Block], labels: dict[tuple[int, str], int]) -> None:
    """Fill in the successors: labels are looked up from the innermost scope outwards."""
    for index, block in enumerate(blocks):
        names, scopes = block.targets
        for name in names:
            home = next((scope for scope in scopes if (scope, name) in labels), None)
            if home is not None:
                block.successors.append(labels[home, name])
        following = index + 1
        if block.falls and following < len(blocks):
            block.successors.append(following)


def natural_loops(blocks: list[Block]) -> list[frozenset[int]]:
    """Find the natural loops, as sets of block indices; loops with one header are one loop.

    An edge to a block that dominates its source closes a loop: the blocks that reach the source
    without passing the header are its body.
    """
    order, before = _reachable(blocks)
    dominators = _dominators(blocks, order, before)
    bodies: dict[int, set[int]] = {}
    for source in order:
        for header in blocks[source].successors:
            if dominators[source] >> header & 1:
                body = bodies.setdefault(header, {header})
                pending = [source]
                while pending:
                    node = pending.pop()
                    if node not in body:
                        body.add(node)
                        pending += before[node]
    return [frozenset(body) for _, body in sorted(bodies.items())]


def _reachable(blocks: list[Block]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the blocks that can run, in the order of a walk, and the predecessors of each."""
    order: list[int] = []
    before: dict[int, list[int]] = {i: [] for i, b in enumerate(blocks) if b.is_entry}
    pending = list(before)
    while pending:
        node = pending.pop()
        order.append(node)
        for target in blocks[node].successors:
            if target not in before:
                before[target] = []
                pending.append(target)
            before[target].append(node)
    return order, before


def _dominators(
    blocks: list[Block], order: list[int], before: dict[int, list[int]]
) -> dict[int, int]:
    """Return for each block the set of blocks that every path to it passes, as bits."""
    everything = (1 << len(blocks)) - 1
    found = {i: 1 << i if blocks[i].is_entry else everything for i in order}
    changed = True
    while changed:
        changed = False
        for node in order:
            if blocks[node].is_entry:
                continue
            common = everything
            for predecessor in before[node]:
                common &= found[predecessor]
            common |= 1 << node
            changed |= common != found[node]
            found[node] = common
    return found
