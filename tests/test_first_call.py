"""A first call of a new process that finds everything on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dispatch_fakes import Machine, operands

import costmodel

PROGRAM = """
import json, sys
from pathlib import Path
import pytest
from dispatch_fakes import Machine, operands
import costmodel

Machine(pytest.MonkeyPatch(), Path(sys.argv[1]))
a, b = operands(64, 256, 256)
matmul = costmodel.matmul
before = {*sys.modules}
matmul(a, b)
imported = sorted({*sys.modules} - before)
counted = costmodel.stats()
print(json.dumps([imported, counted.disk_hits, counted.tuned]))
"""


@pytest.mark.fault("B49")
def test_it_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the shipped model, whose trees it needs not: all modules came with ``matmul`` itself."""
    Machine(monkeypatch, tmp_path)
    costmodel.matmul(*operands(64, 256, 256))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=Path(__file__).parent, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    imported, disk_hits, tuned = json.loads(done.stdout)
    assert (disk_hits, tuned) == (1, 0)
    assert imported in ([], ["costmodel.kernels"])  # the folder in which a kernel's file is found
