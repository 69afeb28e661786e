"""A kernel family of one's own: what the base class does for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.compile.ptx import extract
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import KernelFamily, families
from costmodel.gemm.kernels import VARIABLE
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload

HERE = Path(__file__).parent
KERNEL = (HERE / "toy_kernel.py").read_text(encoding="utf-8").replace("gemm_toy", "gemm_own")
FAMILY = """
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import KernelFamily


class OwnFamily(KernelFamily):
    name = "own"
    kernel = "own_kernel:gemm_own"

    def points(self):
        yield GemmConfig(self.name, 64, 64, 32, 4, 3)


FAMILY = OwnFamily()
"""
CONFIG = "own 64x64x32 w4 s3 g8"


class Plain(KernelFamily):
    name = "pointer"
    is_masked = True


def of_its_own(folder: Path, family: str, kernel: str, *arguments: str) -> str:
    """What Python prints in a process that knows this family."""
    (folder / "own.py").write_text(family, encoding="utf-8")
    (folder / "own_kernel.py").write_text(kernel, encoding="utf-8")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parent)])]
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, env={**os.environ, VARIABLE: "own", "PYTHONPATH": os.pathsep.join(paths),
                          "COSTMODEL_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    assert "Traceback" not in done.stdout
    return done.stdout


# --- What the base class does ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a_layout", "b_layout", "units"),
    [("row", "row", {"stride_ak", "stride_bn"}), ("col", "col", {"stride_am", "stride_bk"}),
     ("row", "col", {"stride_ak", "stride_bk"})],
)  # fmt: skip
def test_a_plain_family_says_which_strides_are_one(a_layout, b_layout, units: set[str]) -> None:  # type: ignore[no-untyped-def]
    workload = Workload.dense(512, 512, 512, a_layout=a_layout, b_layout=b_layout)
    baked = Plain().constants(specialize(workload, GemmConfig("pointer", 64, 64, 32)))
    strides = {name for name, value in baked.items() if name.startswith("stride")}
    assert strides == units | {"stride_cn"}
    assert baked["EVEN_K"] is True


def test_a_plain_family_counts_only_the_buffers_that_are_copied_ahead() -> None:
    for k, ahead in ((512, True), (511, False)):  # rows of 2 bytes cannot be copied ahead
        code = Workload.dense(512, 512, k).code
        assert Plain().pipelined(code) == (ahead, True)
    assert families()["tma"].pipelined(code) == (True, True)


@pytest.mark.slow
def test_the_loads_of_a_plain_family_are_asynchronous(tmp_path: Path) -> None:
    command = ("-m", "costmodel", "compile", "512", "512", "512", "--target", "h100-sxm",
               "--config", CONFIG, "--dump", str(tmp_path))  # fmt: skip
    assert "1 compiled, 0 failed" in of_its_own(tmp_path, FAMILY, KERNEL, *command)
    (ptx,) = tmp_path.glob("*.ptx")
    assert extract(ptx.read_text(encoding="utf-8"))["all_cp_async"] > 0


# --- Tests that go over all kernels ---------------------------------------------------------------


@pytest.mark.parametrize("file", ["gpu/test_kernels_gpu.py", "golden/regenerate.py"])
def test_every_kernel_is_in_the_lists_of_the_tests(file: str) -> None:
    named = {*re.findall(r'"(\w+)"', (HERE / file).read_text(encoding="utf-8"))}
    lacking = [family.name for family in families().values() if family.name not in named]
    assert lacking == [], f"tests/{file} has no configuration of these kernels"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_of_the_space_hold_with_a_kernel_more(tmp_path: Path) -> None:
    tests = [str(HERE / f"test_{name}.py") for name in ("space", "rows", "specialize")]
    command = ("-m", "pytest", *tests, "-m", "not slow", "-p", "no:cacheprovider", "--tb=short")
    printed = of_its_own(tmp_path, FAMILY, KERNEL, *command)
    assert re.search(r"\d+ passed|\[100%\]", printed), printed
    assert "FAILED" not in printed, printed
