"""Every class of code that there may be, for property tests."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from costmodel.gemm.workload import ACTIVATIONS, DTYPES, OUT_DTYPES, CodeClass, Layout

__all__ = ["TYPES", "code_classes"]

TYPES = [
    (dtype, out, tf32)
    for dtype, outs in OUT_DTYPES.items()
    for out in outs
    for tf32 in ((False, True) if dtype == "float32" else (False,))
]
"""(dtype, out_dtype, tf32): all that go together."""


@st.composite
def code_classes(draw: Any) -> CodeClass:
    """Any class of code: an operand is aligned to an element of it at least."""
    dtype, out, tf32 = draw(st.sampled_from(TYPES))
    layouts = [draw(st.sampled_from(get_args(Layout))) for _ in range(3)]
    aligns = [
        draw(st.sampled_from([n for n in (2, 4, 8, 16) if n >= DTYPES[name]]))
        for name in (dtype, dtype, out)
    ]
    wide, bias = draw(st.booleans()), draw(st.booleans())
    activation = draw(st.sampled_from(ACTIVATIONS))
    return CodeClass(dtype, out, *layouts, *aligns, wide, bias, activation, tf32)
