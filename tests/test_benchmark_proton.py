"""The benchmark that records a Proton session: its scopes, as Proton writes them, and its tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_fakes import FOLDER, H100, ROOT

from costmodel.errors import InvalidInput
from costmodel.gemm.workload import Workload

SQUARE = Workload.dense(1024, 1024, 1024)

# The kernels need a GPU; the scopes do not: this is Proton itself, with the back end that has no
# driver.
SESSION = """
import sys
sys.path.insert(0, {folder!r})
from bench_proton import record
from costmodel.gemm.workload import Workload
from triton._C.libproton import proton
from triton.profiler.flags import flags
proton.start({out!r}, "shadow", "tree", "instrumentation", "cuda")
flags.profiling_on = True
called = []
record({{Workload.dense(1024, 1024, 1024): {{"torch": lambda: called.append(1)}}}}, 3)
proton.finalize_all("hatchet")
print(len(called))
"""


def test_a_scope_has_the_flops_and_bytes_of_all_repeats(script: Any, tmp_path: Path) -> None:
    code = SESSION.format(folder=str(FOLDER), out=str(tmp_path / "session"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    product, torch = script("bench_proton").read_tree(tmp_path / "session.hatchet", H100.device)
    assert product["scope"] == "1024x1024x1024"
    assert torch["scope"] == "  torch"
    assert torch["us"] is torch["tflops"] is None, "nothing ran on a GPU"
    (scope,) = json.loads((tmp_path / "session.hatchet").read_text())[0]["children"][0]["children"]
    assert scope["metrics"] == {"flops": 3 * SQUARE.flops(), "bytes": 3 * SQUARE.bytes()}


def node(name: str, metrics: dict[str, float], *children: Any) -> dict[str, Any]:
    return {"frame": {"name": name, "type": "function"}, "metrics": metrics, "children": children}


def test_the_tree_says_how_fast_each_scope_was(script: Any) -> None:
    kernels = [node("gemm", {"time (ns)": 8000, "count": 2}), node("sum", {"time (ns)": 2000})]
    scope = node("ours", {"flops": 4e9, "bytes": 2e7}, *kernels)
    rows = list(script("bench_proton").tree(node("product", {}, scope), H100.device))
    assert [row["scope"] for row in rows] == ["product", "  ours", "    gemm", "    sum"]
    for row in rows[:2]:
        assert row["us"] == 10.0
        assert row["launches"] == 2
        assert row["tflops"] == pytest.approx(400)
        assert row["gbs"] == pytest.approx(2000)
        least_us = H100.device.roofline_us(4e9, 2e7, "float16")
        assert row["roofline_pct"] == pytest.approx(10 * least_us)
    assert rows[2]["us"] == 8.0
    assert rows[2]["tflops"] is None, "a kernel's own flops are not known"


def test_products_are_named_by_three_numbers(script: Any) -> None:
    bench = script("bench_proton")
    assert bench.sizes([1024, 1024, 1024]) == [SQUARE]
    assert len(bench.sizes([])) == len(bench.SHAPES)
    with pytest.raises(InvalidInput, match="three numbers"):
        bench.sizes([1, 2])
