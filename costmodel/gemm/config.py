"""A point in the space: which kernel, and with which tiles, warps, stages and splits."""

import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from costmodel.errors import InvalidInput
from costmodel.files import Named
from costmodel.gemm.kernels import NAME, known
from costmodel.gemm.workload import LARGEST, CodeClass


class ConfigBinary(NamedTuple):
    """The part of a configuration that is in the binary; fields as in :class:`GemmConfig`.

    Its text is that of a plain tuple, and is part of the keys of artifacts.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    maxnreg: int
    halves: bool
    flatten: bool
    split: bool

    def __repr__(self) -> str:
        return tuple.__repr__(self)


@dataclass(frozen=True, order=True)
class GemmConfig:
    """One way to compute a matrix product.

    Attributes:
        kernel: the name of its family, see :mod:`costmodel.gemm.kernels`.
        block_m, block_n, block_k: the tile of C that a program computes, and the step along K:
            powers of two. For ``warp_specialized``, M may also be 192, and N the sum of two powers.
        num_warps: warps of a program; for ``warp_specialized``, only those that multiply.
        num_stages: depth of the software pipeline.
        maxnreg: upper limit of registers per thread; 0 leaves it to ptxas.
        halves: the epilogue stores the tile in two halves (TMA kernels; for ``warp_specialized``
            only with one accumulator: two are always stored in parts).
        flatten: one loop over tiles and steps (``tma_persistent``).
        repack: operands that TMA cannot address are first copied into aligned rows (TMA kernels);
            a launch argument: the binary is that of aligned operands.
        group_m: height, in tiles, of the stripes in which C is computed; a launch argument, not
            part of the binary.
        split_k: programs that share the K of one tile; only ``split_k > 1`` is in the binary.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int = 0
    halves: bool = False
    flatten: bool = False
    repack: bool = False
    group_m: int = 8
    split_k: int = 1

    def __post_init__(self) -> None:
        family = known().get(self.kernel) if isinstance(self.kernel, str) else None
        if family is None:
            raise InvalidInput(f"kernel={self.kernel!r}: expected one of {', '.join(known())}")
        for name in _INTEGERS:
            value = getattr(self, name)
            if type(value) is not int or not (0 if name == "maxnreg" else 1) <= value <= LARGEST:
                raise InvalidInput(f"{name}={value!r}: expected a small positive integer")
        for name in family.powers_of_two:
            value = getattr(self, name)
            if value & (value - 1):
                raise InvalidInput(f"{name}={value}: expected a power of two")
        for name in ("halves", "flatten", "repack"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: expected true or false")

    @property
    def binary(self) -> ConfigBinary:
        """The part that is in the binary: configurations with equal parts share a binary."""
        return ConfigBinary(
            self.kernel, self.block_m, self.block_n, self.block_k, self.num_warps,
            self.num_stages, self.maxnreg, self.halves, self.flatten, self.split_k > 1,
        )  # fmt: skip

    def to_dict(self) -> Named:
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Named) -> Self:
        """The inverse of :meth:`to_dict`; unknown, missing or mistyped fields are refused.

        Raises:
            InvalidInput: the message names the field that is wrong.
        """
        names = cls.__dataclass_fields__.keys()
        if not isinstance(row, dict) or row.keys() != names:
            found = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise InvalidInput(f"not a configuration: expected {sorted(names)}, found {found}")
        return cls(**row)

    def __str__(self) -> str:
        """A short readable name: ``tma 128x256x64 w8 s4 g8 k2 r128 halves``."""
        parts = [
            f"{self.kernel} {self.block_m}x{self.block_n}x{self.block_k}",
            f"w{self.num_warps} s{self.num_stages} g{self.group_m}",
            f"k{self.split_k}" * (self.split_k > 1),
            f"r{self.maxnreg}" * (self.maxnreg > 0),
            "halves" * self.halves,
            "flat" * self.flatten,
            "repack" * self.repack,
        ]
        return " ".join(p for p in parts if p)


def parse_config(text: str) -> GemmConfig:
    """The configuration of this short name: the inverse of ``str(config)``.

    Raises:
        InvalidInput: the text is no such name; the message shows one.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"{text!r:.100} names no configuration: expected something like "
            f"'tma 128x256x64 w8 s4 g8', as `costmodel rank` lists them"
        )
    found = match.groupdict()
    marks = {name: found.pop(name) is not None for name in ("halves", "flatten", "repack")}
    kernel = found.pop("kernel")
    numbers: Named = {name: int(value) for name, value in found.items() if value is not None}
    return GemmConfig(kernel=kernel, **numbers, **marks)


def as_config(name: str, value: Any, others: str = "") -> GemmConfig:
    """Return the configuration of an argument, which may be its short name.

    Args:
        others: what else the argument may be, for the message.

    Raises:
        InvalidInput: the argument is neither; the message shows the form.
    """
    if isinstance(value, GemmConfig):
        return value
    if isinstance(value, str) and _NAME.fullmatch(value.strip()):
        return parse_config(value)
    raise InvalidInput(
        f"{name}={value!r:.80}: expected a GemmConfig{others}, or its short name, "
        f"such as 'tma 128x256x64 w8 s4 g8'"
    )


@dataclass(frozen=True)
class Specialization:
    """The input of one compiled binary: hashable, JSON-ready, independent of sizes.

    Attributes:
        config_binary: :attr:`GemmConfig.binary` of the configurations that share it.
        code: the code class.
        even_k: K is a multiple of BLOCK_K; False if the kernel does not mask the tail of K.
    """

    config_binary: ConfigBinary
    code: CodeClass
    even_k: bool

    @property
    def kernel(self) -> str:
        return self.config_binary.kernel


_NAME = re.compile(
    rf"(?P<kernel>{NAME})"
    r" (?P<block_m>\d{1,4})x(?P<block_n>\d{1,4})x(?P<block_k>\d{1,4})"
    r" w(?P<num_warps>\d{1,4}) s(?P<num_stages>\d{1,4}) g(?P<group_m>\d{1,4})"
    r"(?: k(?P<split_k>\d{1,4}))?(?: r(?P<maxnreg>\d{1,4}))?"
    r"(?P<halves> halves)?(?P<flatten> flat)?(?P<repack> repack)?",
    re.ASCII,
)
_INTEGERS = (
    "block_m", "block_n", "block_k", "num_warps", "num_stages", "maxnreg", "group_m", "split_k",
)  # fmt: skip
