"""NVIDIA's compute-sanitizer finds nothing in the kernels: no wild access, no race."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from costmodel.gemm.specialize import kernel_function

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer"),
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).with_name("sanitized_kernels.py")


@pytest.mark.fault("B01", "B19")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        PROGRAM,
    ]
    # Each tensor an allocation of its own: what lies beside it is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert "products are right" in done.stdout, done.stdout[-5000:]
    reports = [lines for lines in reported(done.stdout) if not switches_regions(lines)]
    assert not reports, done.stdout[-5000:]
    if tool == "memcheck":
        assert done.returncode == 0, done.stdout[-5000:]


def reported(text: str) -> list[list[tuple[str, int]]]:
    """The places, file and line, that each error in the output of a sanitizer names."""
    errors = re.findall(
        r"^=+ +(?:Error|ERROR:|Warning|WARN|Invalid|Race|Program).*\n(?:^=+ {2,}\S.*\n)*",
        text,
        re.M,
    )
    return [
        [(file, int(line)) for file, line in re.findall(r"(\w+\.py):(\d+)", error)]
        for error in errors
    ]


def switches_regions(places: list[tuple[str, int]]) -> bool:
    """Whether all places are in the body of the warp-specialised kernel, none in its regions.

    Nothing stands there but barriers, before anything is copied, and the switch by which Triton
    sends warps to their regions. Its two sides meet at a hardware barrier that racecheck does not
    see between warps of different regions.
    """
    code, first = inspect.getsourcelines(kernel_function("warp_specialized").fn)
    body = range(first, first + len(code))
    return bool(places) and all(
        file == "warp_specialized.py" and line in body for file, line in places
    )
