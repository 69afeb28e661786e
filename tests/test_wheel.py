"""The built wheel: what is in it, and that it works where the repository is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "datasets", "*.egg-info", "build", "__pycache__")

Program = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository and nothing old gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    done = subprocess.run(
        [*command, str(folder), str(folder / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Runs a program of an environment that has the wheel, in an empty folder."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    # The other packages are those of this environment. Its .pth files do not count from there, so
    # that an editable costmodel is not found.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "empty").mkdir()
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(environment / "bin" / "python"), *arguments], cwd=folder / "empty", env=variables,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_only_top_level_name_is_costmodel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"costmodel"}


def test_its_contents_are_sound(wheel: Path) -> None:
    check = [sys.executable, "-m", "check_wheel_contents", "--toplevel", "costmodel", str(wheel)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_it_carries_kernels_types_and_models(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"costmodel/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").glob("*.py")}
    models = {
        f"costmodel/_models/{p.relative_to(ROOT / 'models')}"
        for p in (ROOT / "models").rglob("*")
        if p.is_file()
    }
    assert names >= sources | models | {
        "costmodel/py.typed",
        "costmodel/evaluation/eval.csv",
        "costmodel/reports/page.html",
    }


def test_it_is_what_is_imported(program: Program) -> None:
    found = program("-c", "import costmodel; print(costmodel.__file__)").strip()
    assert not Path(found).is_relative_to(ROOT)


def test_the_program_starts(program: Program) -> None:
    assert "doctor" in program("-m", "costmodel", "--help")


def test_it_compiles(program: Program) -> None:
    arguments = ("64", "64", "64", "--target", "h100-sxm", "--limit", "1", "--json")
    found = json.loads(program("-m", "costmodel", "compile", *arguments))
    assert found["compiled"] == 1


def test_it_ranks(program: Program) -> None:
    arguments = ("4096", "4096", "4096", "--target", "h100-sxm", "--top", "3", "--json")
    found = json.loads(program("-m", "costmodel", "rank", *arguments))
    assert len(found["ranked"]) == 3


def test_tests_pass_against_it(program: Program) -> None:
    files = [
        "test_metrics.py", "test_heldout.py", "test_ptx.py", "test_ptx_loops.py",
        "test_ptx_input.py", "test_replay.py",
    ]  # fmt: skip
    options = ("-p", "no:cacheprovider", "--import-mode=importlib")
    # Tests are given by path and know nothing of the repository but their own data.
    output = program("-m", "pytest", *options, *(str(ROOT / "tests" / name) for name in files))
    assert " passed" in output
