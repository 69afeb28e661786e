"""A kernel family is one host file and one name: see ``toy_suite.py``, which this runs.

In a process of its own: the family would be in the space of every other test, and the interpreter
of Triton has to be asked for before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *arguments], cwd=HERE.parent, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_toy_family_goes_all_the_way() -> None:
    done = run(
        "-m", "pytest", str(HERE / "toy_suite.py"), "-p", "no:cacheprovider", "--tb=short",
        TRITON_INTERPRET="1", COSTMODEL_KERNELS="toy_family",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        ("no_such_module", "COSTMODEL_KERNELS names no_such_module: expected a family"),
        ("json", "COSTMODEL_KERNELS names json: expected a family"),
        ("costmodel.gemm.kernels.tma,toy_family", ""),
    ],
)
def test_a_variable_that_names_no_family_is_told(modules: str, error: str) -> None:
    done = run("-m", "costmodel", "rank", "64", "64", "64", "--target", "h100-sxm",
               COSTMODEL_KERNELS=modules)  # fmt: skip
    assert (done.returncode == 0) == (not error)
    assert error in done.stdout
    assert "Traceback" not in done.stdout
