"""Every class of code that there may be, for property tests."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from costmodel.gemm.dtypes import DATA_TYPES
from costmodel.gemm.workload import ACTIVATIONS, CodeClass, Layout

__all__ = ["TYPES", "code_classes"]

TYPES = [
    (row.element, out, row.element != row.name)
    for row in DATA_TYPES.values()
    for out in row.results
]
"""(dtype, out_dtype, tf32): all that go together."""


@st.composite
def code_classes(draw: Any) -> CodeClass:
    """Any class of code: an operand is aligned to an element of it at least."""
    dtype, out, tf32 = draw(st.sampled_from(TYPES))
    layouts = [draw(st.sampled_from(get_args(Layout))) for _ in range(3)]
    aligns = [
        draw(st.sampled_from([n for n in (2, 4, 8, 16) if n >= DATA_TYPES[name].bytes]))
        for name in (dtype, dtype, out)
    ]
    wide, bias = draw(st.booleans()), draw(st.booleans())
    activation = draw(st.sampled_from(ACTIVATIONS))
    return CodeClass(dtype, out, *layouts, *aligns, wide, bias, activation, tf32)
