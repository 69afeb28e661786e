"""A Proton session of a product, on a GPU: the kernels are there, and their speed is possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel.hardware.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).resolve().parents[2]


def test_the_session_shows_both_kernels(script: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "costmodel", "bench", "--proton", "2048", "2048", "2048"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "session")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    device = Target.current().device
    rows = script("bench_proton").read_tree(tmp_path / "session.hatchet", device)
    scopes = {row["scope"].strip(): row for row in rows}
    for name in ("torch.matmul", "costmodel.matmul"):
        assert scopes[name]["launches"] >= 20
        assert 0 < scopes[name]["roofline_pct"] < 110
    assert "torch.matmul" in done.stdout
