"""The sum of split-K partials as ptxas made it: a batch of loads is under way before it is added.

That the sum is right is tested in ``interpreted_kernels.py``; that ptxas keeps to the batches is
seen in the machine code alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import compile_many, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

# How many loads of 16 bytes a thread has under way: 64 registers, fewer only for a small tile.
LOADS = {
    GemmConfig("pointer", 16, 32, 128, 4, 3, split_k=8): 8,
    GemmConfig("tma", 16, 64, 256, 4, 4, split_k=8): 16,
    GemmConfig("tma", 64, 64, 64, 4, 4, split_k=8): 16,
    GemmConfig("tma", 128, 128, 64, 4, 4, split_k=2): 16,
    GemmConfig("tma", 128, 256, 64, 8, 3, split_k=2): 16,
}


def blocks_after_the_arrival(sass: str) -> list[list[str]]:
    """Loads and additions in straight pieces of code, behind the count of arrivals."""
    code = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass)
    arrival = max(i for i, line in enumerate(code) if "ATOM" in line)
    blocks: list[list[str]] = [[]]
    for line in code[arrival:]:
        if re.search(r"\b(BRA|EXIT)\b", line):
            blocks.append([])
        elif re.search(r"\b(LDG|FADD)\b", line):
            blocks[-1].append(line)
    return [block for block in blocks if block]


def loads_that_waited(block: list[str]) -> int:
    """Loads behind an addition of what an earlier load of the same block brings."""
    coming: set[int] = set()
    late, waiting = 0, False
    for line in block:
        registers = [int(r) for r in re.findall(r"\bR(\d+)", line)]
        if "LDG" in line:
            late += waiting
            coming |= set(range(registers[0], registers[0] + 4))
        else:
            waiting |= bool(coming & set(registers[1:]))
    return late


@pytest.mark.slow
def test_loads_of_a_batch_are_under_way_together(tmp_path: Path) -> None:
    workload = Workload.dense(128, 128, 16384)
    specs = {specialize(workload, config): config for config in LOADS}
    for artifact in compile_many(specs, Target.named("h100-sxm"), n_jobs=2, dump=tmp_path):
        config = specs[artifact.spec]
        blocks = blocks_after_the_arrival((tmp_path / f"{artifact.key}.sass").read_text())
        loads = [sum("LDG" in line for line in block) for block in blocks]
        assert loads[0] == LOADS[config], config
        assert [loads_that_waited(block) for block in blocks] == [0] * len(blocks), config
        assert artifact.spill_bytes == 0
