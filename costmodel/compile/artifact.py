"""The result of compiling: PTX features, registers, spills, shared memory, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ArtifactStatus = Literal["ok", "compile_error", "crashed", "timeout"]

PASSING: tuple[ArtifactStatus, ...] = ("crashed", "timeout")
"""Failures that may not happen again: such an artifact is not kept for good."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled binary.

    Attributes:
        key: its identity: what it was made of, and what made it.
        spec: what was to be compiled, as the caller described it.
        status: ``ok``, or how compiling failed; then ``error`` says why and the rest is empty.
        registers: 32-bit registers per thread of the binary (``cuobjdump``).
        spill_bytes: stack frame of a thread, which in these kernels holds spills only; the one
            definition of a spill.
        shared_bytes: shared memory of a block, static and dynamic.
        ptx_hash: hash of the PTX without debug information: equal hashes are the same program.
        ptx: the counts of :data:`costmodel.compile.ptx.PTX_FEATURES`, by name.
        compile_s: wall seconds.
    """

    key: str
    spec: Any
    status: ArtifactStatus = "ok"
    error: str = ""
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    ptx_hash: str = ""
    ptx: Mapping[str, float] = field(default_factory=dict)
    compile_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def refused(self) -> bool:
        """Return True if the compiler said no, as it will again."""
        return self.is_settled and not self.ok

    @property
    def is_settled(self) -> bool:
        """Return True if another compile would give the same."""
        return self.status not in PASSING


def outweighs(status: ArtifactStatus, other: ArtifactStatus) -> bool:
    """Return True if an artifact replaces an earlier one of its key."""
    return _weight(status) > _weight(other)


def _weight(status: ArtifactStatus) -> int:
    return 2 if status == "ok" else int(status not in PASSING)
