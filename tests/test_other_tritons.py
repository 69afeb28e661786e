"""What works on any Triton kernel works with other Tritons than the installed one.

`.ci/run` puts them into ``.venv/tritons``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ["tests/test_ttir.py"]
RUN = """
import sys, pytest, triton
assert triton.__version__ == sys.argv[1], triton.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.fault("B40")
@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.9.0"])
def test_other_tritons_pass_the_same_tests(version: str) -> None:
    folder = ROOT / ".venv" / "tritons" / version
    if not folder.exists() and not os.environ.get("CI"):
        pytest.skip(f"no Triton {version} in {folder}: .ci/run installs it")
    # Triton 3.9 warns where nothing is said about fused multiply and add.
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, version, "-p", "no:cacheprovider", *FILES],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
