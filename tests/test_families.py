"""A kernel family of one's own: what the base class does for it, and mistakes that are told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.compile.ptx import extract
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import KernelFamily, families
from costmodel.gemm.kernels import FAMILIES, VARIABLE, known
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload

HERE = Path(__file__).parent
KERNEL = (HERE / "toy_kernel.py").read_text(encoding="utf-8").replace("gemm_toy", "gemm_own")
FAMILY = """
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import KernelFamily


class OwnFamily(KernelFamily):
    name = "own2"
    kernel = "own_kernel:gemm_own"

    def points(self):
        yield GemmConfig(self.name, 64, 64, 32, 4, 3)


FAMILY = OwnFamily()
"""
CONFIG = "own2 64x64x32 w4 s3 g8"


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
        assert Plain().pipelined(code) == [ahead, True]
    assert families()["tma"].pipelined(code) == [True, True]


@pytest.mark.slow
def test_the_loads_of_a_plain_family_are_asynchronous(tmp_path: Path) -> None:
    command = ("-m", "costmodel", "compile", "512", "512", "512", "--target", "h100-sxm",
               "--config", CONFIG, "--dump", str(tmp_path))  # fmt: skip
    assert "1 compiled, 0 failed" in of_its_own(tmp_path, FAMILY, KERNEL, *command)
    (ptx,) = tmp_path.glob("*.ptx")
    assert extract(ptx.read_text(encoding="utf-8"))["all_cp_async"] > 0


# --- Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("FAMILY = OwnFamily()", "FAMILY = OwnFamily"), "FAMILY of own: expected an instance"),
        (("own2", "Own-2"), r"expected .* a name of a-z, 0-9 and _, found .*'Own-2'"),
        (('    name = "own2"\n', ""), "names own: expected a family .*no attribute 'name'"),
        (("def points(self):", "def points(self:"), r"expected a family .*own.py, line"),
        (("own2", "tma"), "COSTMODEL_KERNELS: own has a kernel tma, as another has"),
    ],
)
def test_a_module_that_is_no_family_is_told(
    change: tuple[str, str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FAMILY.replace(*change), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "own")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(InvalidInput, match=error):
        known.__wrapped__()
    sys.modules.pop("own", None)


def test_modules_may_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f" {FAMILIES[0]}, {FAMILIES[1]},")
    assert known.__wrapped__() == families()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("gemm_own", "gemm_other"), "own_kernel defines no gemm_other"),
        (("own_kernel", "nowhere"), "no file of nowhere, which a kernel family names"),
        (("yield GemmConfig(self.name, 64, 64, 32, 4, 3)", "return iter(())"), "place"),
    ],
)
def test_a_family_without_a_kernel_or_points_is_told(
    change: tuple[str, str], error: str, tmp_path: Path
) -> None:
    command = ("-m", "costmodel", "rank", "64", "64", "64", "--target", "h100-sxm")
    assert error in of_its_own(tmp_path, FAMILY.replace(*change), KERNEL, *command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("WIDE: tl.constexpr,", "WIDE: tl.constexpr, EVEN_K: tl.constexpr,", "EVEN_K"),
     ("GROUP_M,\n    BLOCK_M", "GROUP_M, alpha,\n    BLOCK_M", "alpha"),
     ("PRECISION: tl.constexpr, ", "", "PRECISION")],
)  # fmt: skip
def test_arguments_that_do_not_fit_the_family_are_named(
    old: str, new: str, name: str, tmp_path: Path
) -> None:
    assert KERNEL.count(old) == 1
    command = ("-m", "costmodel", "compile", "64", "64", "64", "--target", "h100-sxm",
               "--config", CONFIG, "--json")  # fmt: skip
    printed = of_its_own(tmp_path, FAMILY, KERNEL.replace(old, new), *command)
    assert f"own_kernel:gemm_own and its family differ in {name}: expected" in printed


@pytest.mark.fault("B16")
@pytest.mark.parametrize("written", ["LIMIT = tl.constexpr({})", "LIMIT: tl.constexpr = {}"])
def test_a_constant_beside_the_kernel_is_in_its_hash(written: str, tmp_path: Path) -> None:
    hashes = []
    code = "from costmodel.gemm.specialize import kernel_hash; print(kernel_hash('own2'))"
    for constant in ("", written.format(8), written.format(9)):
        kernel = KERNEL.replace("@triton.jit", f"{constant}\nOTHER = {len(hashes)}\n@triton.jit")
        used = kernel.replace("tl.zeros(", "LIMIT + tl.zeros(") if constant else kernel
        hashes.append(of_its_own(tmp_path, FAMILY, used, "-c", code))
    assert len({*hashes}) == 3
    assert of_its_own(tmp_path, FAMILY, KERNEL, "-c", code) == hashes[0], "OTHER is not used"


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
