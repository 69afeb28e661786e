"""The workloads whose ranking is frozen: three lists of real shapes, and 300 seeded ones."""

from __future__ import annotations

import csv
import random
from math import gcd
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes.csv"
TARGETS = ("h100-sxm", "h200-sxm", "a100-sxm")  # the last one has no model
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MOST = 2**31 - 1

Fields = dict[str, Any]


def all_workloads() -> dict[str, Fields]:
    """Fields by a readable name; none twice."""
    found = [*listed(), *seeded()]
    return {name_of(fields): fields for fields in found}


def listed() -> list[Fields]:
    """The lists as float16, with row-major operands."""
    with SHAPES.open(newline="", encoding="utf-8") as file:
        sizes = [tuple(int(row[x]) for x in "mnk") for row in csv.DictReader(file)]
    return [
        fields_of((m, n, k), a_align=gcd(16, 2 * k), b_align=gcd(16, 2 * n), c_align=gcd(16, 2 * n))
        for m, n, k in sizes
    ]


def fields_of(size: tuple[int, int, int], **code: Any) -> Fields:
    """All fields, in the order and with the defaults of `rank --json`."""
    m, n, k = size
    plain: Fields = {
        "m": m, "n": n, "k": k, "dtype": "float16", "out_dtype": "float16", "a_layout": "row",
        "b_layout": "row", "c_layout": "row", "a_align": 16, "b_align": 16, "c_align": 16,
        "wide": max(m * k, k * n, m * n) > MOST, "bias": False, "activation": "none", "tf32": False,
    }  # fmt: skip
    return {**plain, **code}


def seeded(count: int = 300, seed: int = 16) -> list[Fields]:
    """Four sizes for each of 75 classes of code: what does not depend on sizes is computed once."""
    draw = random.Random(seed)
    found: dict[str, Fields] = {}
    while len(found) < count:
        code = _code(draw, len(found) // 4)
        unit = draw.choice((1, 2, 4, 8, 16, 32, 64, 128, 256))
        for _ in range(min(4, count - len(found))):
            fields = _sized(draw, code, unit)
            found[name_of(fields)] = fields
    return list(found.values())


def _code(draw: random.Random, turn: int) -> Fields:
    """A class of code. The kind goes round; half of the classes have what is common."""
    kind = ("float16", "bfloat16", "float32", "tf32", "float16", "bfloat16")[turn % 6]
    dtype = "float32" if kind == "tf32" else kind
    out_dtype = "float32" if draw.random() < 0.25 else dtype
    common = draw.random() < 0.5
    code: Fields = {
        "dtype": dtype, "out_dtype": out_dtype, "tf32": kind == "tf32",
        "bias": draw.random() < 0.4, "activation": draw.choice(("none", "relu", "gelu", "silu")),
        "wide": draw.random() < 0.1,
    }  # fmt: skip
    for name in "abc":
        item = BYTES[out_dtype if name == "c" else dtype]
        layout = draw.choice(("row", "row", "col") if common else ("row", "col", "strided"))
        widest = item if layout == "strided" else 16
        aligns = [x for x in (16, 8, 4, 2) if item <= x <= widest]
        code[f"{name}_layout"] = layout
        code[f"{name}_align"] = aligns[0] if common else draw.choice(aligns)
    return code


def _sized(draw: random.Random, code: Fields, unit: int) -> Fields:
    """Sizes that agree with the alignments; k is an odd number of units."""
    item, out_item = BYTES[code["dtype"]], BYTES[code["out_dtype"]]
    units = {"m": 1, "n": 1, "k": unit}
    for name, (rows, columns), size in (
        ("a", "mk", item), ("b", "kn", item), ("c", "mn", out_item),
    ):  # fmt: skip
        extent = {"row": columns, "col": rows}.get(code[f"{name}_layout"])
        if extent is not None:
            units[extent] = max(units[extent], code[f"{name}_align"] // size)
    m = draw.choice((_edge(draw), _any(draw, 1, 64), _any(draw, 1, 100_000)))
    n, k = _any(draw, 1, 20_000), _any(draw, 1, 20_000)
    if code["wide"]:  # some of them by their sizes, the others by their strides
        large = draw.choice((None, (70_001, 40_000, 64), (16, 151_936, 16_384), (300_000, 8, 8192)))
        m, n, k = large or (m, n, k)
    m, n = (-(-x // units[name]) * units[name] for name, x in (("m", m), ("n", n)))
    k = max(k // units["k"] | 1, 1) * units["k"]
    sizes_pass = max(m * k, k * n, m * n) > MOST
    return fields_of((m, n, k), **{**code, "wide": code["wide"] or sizes_pass})


def _edge(draw: random.Random) -> int:
    """An m beside the end of a bucket: octaves up to 128, then quarters of an octave."""
    ends = (1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 224, 256, 320, 512, 640, 1024, 1280, 4096, 7168)
    return max(draw.choice(ends) + draw.choice((-1, 0, 1)), 1)


def _any(draw: random.Random, least: int, most: int) -> int:
    """Each octave as often as the others."""
    return int(least * (most / least) ** draw.random())


def name_of(fields: Fields) -> str:
    """A readable name that no other workload of the lists has."""
    size = "x".join(str(fields[x]) for x in "mnk")
    layouts = "/".join(f"{fields[f'{x}_layout']}{fields[f'{x}_align']}" for x in "abc")
    marks = [x for x in ("wide", "bias", "tf32") if fields[x]]
    return " ".join((size, f"{fields['dtype']}>{fields['out_dtype']}", layouts, *marks,
                     fields["activation"]))  # fmt: skip
