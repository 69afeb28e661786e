"""Counts of PTX instructions. Pure functions of the text: nothing is compiled or timed.

The text is first brought to a normal form (:func:`normalize`): one statement a line, without
the parts that depend on where it was compiled. Only the normal form is counted, so equal hashes
always mean equal features.

Loops are found in the flow graph, not in the order of the text: LLVM may lay out the first half
of a loop behind its second (it does for sm_100), and the wait loops of inline assembly all carry
the same label, each in its own ``{ }`` scope.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from costmodel.errors import InvalidInput
from costmodel.files import digest

PTX_SCHEMA = 1
"""Version of the features: their names, order and meaning."""

# What is counted. mma_sync, wgmma, tcgen05_mma: of the tensor cores (Ampere, Hopper, Blackwell)
#   mma_flops: 2*m*n*k of these three; their shapes are per warp, warp group and block
#   cp_async: asynchronous copies global -> shared, not bulk
#   bulk_load: cp.async.bulk into shared memory, including TMA
#   bulk_store: cp.async.bulk and cp.reduce.async.bulk out of shared memory
#   ld_shared_bytes: per thread: vector width times size of the type
#   tmem: traffic with tensor memory
#   predicated: instructions under a guard @%p, including guarded branches
#   predicate_ops: setp, selp, set, and logic on .pred
#   int_arith: integer, bitwise and address arithmetic
#   fence: also the commits and waits of asynchronous groups
_COUNTED = """
    instructions mma_sync wgmma tcgen05_mma mma_flops cp_async bulk_load bulk_store ldmatrix
    stmatrix ld_shared ld_shared_bytes st_shared st_shared_bytes ld_global ld_global_bytes
    st_global st_global_bytes tmem barrier mbarrier branch predicated predicate_ops cvt int_arith
    float_arith shuffle fence atomic mov
"""
_COUNTS = tuple(_COUNTED.split())

# The hand-weighted score counts instructions whose opcode starts with these. cp.async includes bulk
# copies, commits and waits, as in a search of the text for the substring.
_SCORED = ("mma.sync", "cp.async", "bar.sync", "bra", "ret")

PTX_FEATURES = (
    *(f"all_{name}" for name in _COUNTS),  # the whole kernel
    *(f"loop_{name}" for name in _COUNTS),  # its main loop, zeros where there is none
    "has_loop",  # 1 where there is a main loop
    "loop_depth",  # nesting of the main loop, 1 = outermost; 0 where there is none
    "loops",  # all loops, including waits that spin
    # Virtual registers declared, by width in bits; narrower ones count as 16.
    *(f"reg_{width}" for width in ("pred", 16, 32, 64, 128)),
    "static_shared_bytes",  # declared with a size; dynamic shared memory is not in the text
    *(f"score_{start.replace('.', '_')}" for start in _SCORED),
)
"""Names of the features, in the order of every vector made of them."""


def extract(ptx: str) -> dict[str, float]:
    """Count the features of :data:`PTX_FEATURES`: always all of them, in that order.

    The main loop is the innermost loop that holds a tensor-core instruction; of several, the one
    with the most tensor-core work, then the first. A spinning wait inside it belongs to it.

    Raises:
        InvalidInput: no kernel in the text, or a kernel that breaks off.
    """
    text = normalize(ptx)
    blocks = basic_blocks(text)
    loops = natural_loops(blocks)
    main = _main_loop(blocks, loops)
    whole, inner = _count(blocks), _count(blocks[i] for i in main)
    found = {
        "has_loop": bool(main),
        "loop_depth": sum(main <= loop for loop in loops) if main else 0,
        "loops": len(loops),
        **_declared(text),
        **whole,
        **{f"all_{name}": whole[name] for name in _COUNTS},
        **{f"loop_{name}": inner[name] for name in _COUNTS},
    }
    return {name: float(found.get(name, 0)) for name in PTX_FEATURES}


# --- Normal form -------------------------------------------------------------------------------

_COMMENT = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DEBUG = re.compile(
    r"(?<![\w.])\.(?:loc|file)\b[^\n]*"
    r"|\.section\s[^{]*\{[^}]*\}"
    r"|\$L__(?:tmp|func_begin|func_end)\d+\s*:"
)
_STATEMENT = re.compile(
    r"[{}]"
    r"|[\w$%]+\s*:(?!:)"  # a label
    r"|\.(?:version|target|address_size)\b[^\n]*"  # these end with their line
    r"|(?:\.(?:visible|weak|extern)\s+)?\.(?:entry|func)\b[^{;]*;?"  # a header, up to its body
    r"|[^\s;][^;]*;?"  # all else ends at its semicolon
)


def normalize(ptx: str) -> str:
    """Reduce PTX to the program alone: one statement a line, single blanks.

    Comments, ``.loc``, ``.file``, sections (``.debug_*``) and the labels made for them are
    dropped: they carry paths and line numbers. The same program compiled on another machine
    gives the same text, which ptxas still reads.
    """
    text = _COMMENT.sub(lambda m: m[1] or " ", ptx)
    text = _DEBUG.sub(" ", text)
    return "".join(" ".join(s.split()) + "\n" for s in _STATEMENT.findall(text))


def ptx_hash(ptx: str) -> str:
    """Return 16 hex digits of the normal form: equal for equal programs."""
    return digest(normalize(ptx).encode("utf-8", "surrogatepass"))


# --- Flow graph --------------------------------------------------------------------------------

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
    """Split a text of one statement a line into the linked basic blocks of all its functions.

    Raises:
        InvalidInput: no kernel in the text, or a kernel that breaks off.
    """
    blocks = []
    labels = {}
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
    for index, block in enumerate(blocks):
        names, scopes = block.targets
        for name in names:  # looked up from the innermost scope outwards
            block.successors += [labels[s, name] for s in scopes if (s, name) in labels][:1]
        if block.falls and index + 1 < len(blocks):
            block.successors.append(index + 1)
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
    if base in ("bra", "brx", "ret", "exit", "trap"):
        block.ended, block.falls = True, guard is not None
    elif opcode.startswith("tcgen05.mma."):
        opcode += _tcgen05_shape(opcode, operands, constants)
    block.opcodes.append("@" + opcode if guard else opcode)


def _tcgen05_shape(opcode: str, operands: str, constants: dict[str, str]) -> str:
    """Return the shape, as ``.m128n256k16``: it is in a descriptor, a constant register.

    Empty where the descriptor is not a constant: then the instruction counts, but not its work.
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


def natural_loops(blocks: list[Block]) -> list[frozenset[int]]:
    """Find the natural loops, as sets of block indices; loops with one header are one loop.

    An edge closes a loop if its target, the header, dominates its source: every path to the source
    passes the header. The body is the blocks that reach the source without passing the header.
    """
    order = []  # the blocks that can run; a block comes after those that dominate it
    before: dict[int, list[int]] = {i: [] for i, b in enumerate(blocks) if b.is_entry}
    pending = list(before)
    while pending:
        order.append(node := pending.pop())
        for target in blocks[node].successors:
            if target not in before:
                before[target] = []
                pending.append(target)
            before[target].append(node)
    place = {node: index for index, node in enumerate(order)}

    def body_of(source: int, header: int) -> set[int]:
        """Return the loop that an edge closes; empty if a path to its source avoids its header."""
        body, pending = {header}, [source]
        while pending:
            node = pending.pop()
            if node not in body:
                if blocks[node].is_entry:
                    return set()
                body.add(node)
                pending += before[node]
        return body

    bodies: dict[int, set[int]] = {}
    for source in order:
        for header in blocks[source].successors:
            if place[header] <= place[source]:
                bodies.setdefault(header, set()).update(body_of(source, header))
    return [frozenset(body) for _, body in sorted(bodies.items()) if body]


# --- Counting ----------------------------------------------------------------------------------

_TENSOR = ("mma_sync", "wgmma", "tcgen05_mma")
_SHAPE = re.compile(r"\.m(\d{1,4})n(\d{1,4})k(\d{1,4})")
_FLOAT_TYPE = re.compile(r"\.(?:b?f16|f32|f64|tf32|e\dm\d)(?:x\d)?(?:\.|$)")
_REGISTERS = re.compile(r"^\.reg (?:\.v\d )?\.(\w+) (.*);$", re.MULTILINE)
_SHARED = re.compile(
    r"^\.shared (?:\.align \d+ )?\.(\w+) [\w$]+((?:\[\d{1,9}\]){0,3});$", re.MULTILINE
)

_FLOATS = "fma sqrt rsqrt rcp ex2 lg2 sin cos tanh"
_INTEGERS = """
    abs add addc and bfe bfi bfind bmsk brev clz cnot copysign cvta div dp2a dp4a lop3 mad mad24
    madc max min mul mul24 neg not or popc prmt rem sad shf shl shr sub subc xor
"""
_FLOAT_ONLY = frozenset(_FLOATS.split())
_ARITHMETIC = _FLOAT_ONLY.union(_INTEGERS.split())
# The count of an opcode is found by its base, else by its start: there the first that fits.
_BASES = """
    cvt: cvt
    ldmatrix: ldmatrix
    mbarrier: mbarrier
    mov: mov
    stmatrix: stmatrix
    atomic: atom red
    barrier: bar barrier
    branch: bra brx
    fence: fence membar
    predicate_ops: selp set setp
    shuffle: shfl
"""
_STARTS = """
    mma_sync: mma.
    wgmma: wgmma.mma_async
    fence: wgmma.
    tcgen05_mma: tcgen05.mma
    fence: tcgen05.fence tcgen05.commit tcgen05.wait
    tmem: tcgen05.ld. tcgen05.st. tcgen05.cp.
    fence: cp.async.commit_group cp.async.wait_
    mbarrier: cp.async.mbarrier
    fence: cp.async.bulk.commit_group cp.async.bulk.wait_group
    prefetch: cp.async.bulk.prefetch
    bulk: cp.async.bulk. cp.reduce.async.bulk.
    cp_async: cp.async.
"""
_ROW = re.compile(r"(\w+): (.*)")
_BY_BASE = {base: name for name, bases in _ROW.findall(_BASES) for base in bases.split()}
_BY_START = [(name, tuple(starts.split())) for name, starts in _ROW.findall(_STARTS)]


def _count(blocks: Iterable[Block]) -> Counter[str]:
    """Sum the counts of all instructions of some blocks."""
    total: Counter[str] = Counter()
    for opcode, times in Counter(op for block in blocks for op in block.opcodes).items():
        for name, amount in _contribution(opcode):
            total[name] += amount * times
    return total


def _main_loop(blocks: list[Block], loops: list[frozenset[int]]) -> frozenset[int]:
    """Find the innermost loop with a tensor-core instruction; empty if there is none."""

    def work(loop: frozenset[int]) -> tuple[int, int]:
        counts = _count(blocks[i] for i in loop)
        return counts["mma_flops"], sum(counts[name] for name in _TENSOR)

    holding = [loop for loop in loops if work(loop) > (0, 0)]
    innermost = [loop for loop in holding if not any(other < loop for other in holding)]
    return max(innermost, key=work, default=frozenset())


@functools.lru_cache(maxsize=4096)
def _contribution(opcode: str) -> tuple[tuple[str, int], ...]:
    """Return the counts that one instruction adds to, and how much to each."""
    guarded, opcode = opcode[0] == "@", opcode.removeprefix("@")
    added = [("instructions", 1)] + [("predicated", 1)] * guarded
    category = _category(opcode)
    if category:
        added.append((category, 1))
    if category in _TENSOR and (shape := _SHAPE.search(opcode)):
        added.append(("mma_flops", 2 * int(shape[1]) * int(shape[2]) * int(shape[3])))
    if category.startswith(("ld_", "st_")):
        added.append((f"{category}_bytes", _access_bytes(opcode)))
    added += [(f"score_{s.replace('.', '_')}", 1) for s in _SCORED if opcode.startswith(s)]
    return tuple(added)


def _category(opcode: str) -> str:
    """Return the count that an instruction belongs to; empty if no count names it."""
    base, *parts = opcode.split(".")
    if base in ("ld", "st"):
        spaces = {part.partition("::")[0] for part in parts}
        return next((f"{base}_{s}" for s in ("shared", "global") if s in spaces), "")
    if base in _ARITHMETIC:
        if parts[-1:] == ["pred"]:
            return "predicate_ops"
        is_float = base in _FLOAT_ONLY or _FLOAT_TYPE.search(opcode)
        return "float_arith" if is_float else "int_arith"
    if base in _BY_BASE:
        return _BY_BASE[base]
    found = next((name for name, starts in _BY_START if opcode.startswith(starts)), "")
    if found != "bulk":
        return found
    # The space of the destination comes first.
    directions = [p.partition("::")[0] for p in parts if p.startswith(("shared", "global"))]
    return "bulk_load" if directions[:1] == ["shared"] else "bulk_store"


def _access_bytes(opcode: str) -> int:
    """Return the bytes that a load or store moves for a thread: 16 for ``ld.global.v4.b32``."""
    *parts, type_ = opcode.split(".")
    width = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
    return width * _bits(type_) // 8


def _bits(type_: str) -> int:
    """Return the bits of a type: 32 for ``b32``, ``f32`` and ``f16x2``; 0 if it names no size."""
    size = re.fullmatch(r"[a-z]+(\d{1,3})(?:x(\d))?", type_)
    return int(size[1]) * int(size[2] or 1) if size else 0


def _declared(text: str) -> Counter[str]:
    """Count virtual registers by width, and bytes of statically sized shared memory."""
    total: Counter[str] = Counter()
    for type_, names in _REGISTERS.findall(text):
        width = "pred" if type_ == "pred" else str(max(_bits(type_), 16))
        for name in names.split(","):
            ranged = re.search(r"<(\d{1,9})>", name)
            total[f"reg_{width}"] += int(ranged[1]) if ranged else 1
    for type_, sides in _SHARED.findall(text):
        elements = math.prod(int(side) for side in re.findall(r"\d+", sides))
        total["static_shared_bytes"] += elements * _bits(type_) // 8
    return total
