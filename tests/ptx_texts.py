"""PTX texts that several tests read: golden ones, some by hand, and any kernel."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["EXPECTED", "GOLDEN", "HAND", "MMA", "kernel"]

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
HAND = {
    name: (GOLDEN / "hand" / f"{name}.ptx").read_text() for name in ("sm_80", "sm_90", "sm_100")
}
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};"


def kernel(body: str) -> str:
    return (
        ".version 8.7\n.target sm_80\n.address_size 64\n"
        f".visible .entry k(\n.param .u64 k_param_0\n)\n.reqntid 128\n{{\n{body}\nret;\n}}\n"
    )
