"""``doctor`` names what a set-up lacks. Set-ups are broken for real, none of it is mocked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

from costmodel.cli.doctor import Check, diagnose, usable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
FAKE_SMI = "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 999.1'\n"


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and checks by name, in a process with this environment and little else."""
    base = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [sys.executable, "-m", "costmodel", "doctor", "--json"], cwd=ROOT,
        env=base | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert data["usable"] == (done.returncode == 0), done.stderr
    return done.returncode, {check["name"]: check for check in data["checks"]}


def hide(folder: Path, modules: tuple[str, ...]) -> str:
    """A PYTHONPATH on which modules cannot be imported, as if they were not installed."""
    folder.mkdir()
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    return str(folder)


def look_for(name: str) -> Check:
    """One check, in this process."""
    (check,) = diagnose(only=name)
    return check


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder to be the whole PATH, with a driver's nvidia-smi in it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(FAKE_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    return folder


@pytest.mark.fault("B11")
def test_this_set_up_is_usable_without_a_gpu(tmp_path: Path) -> None:
    code, checks = doctor(PATH=str(tmp_path))
    assert code == 0
    for name in ("Python", "numpy", "torch", "Triton", "ptxas", "cuobjdump", "xgboost", "pyarrow"):
        assert checks[name]["ok"], checks[name]
    assert not checks["NVIDIA driver"]["ok"]
    assert "nvidia-smi" in checks["NVIDIA driver"]["found"]


def test_a_driver_alone_is_not_enough(programs: Path) -> None:
    """Where there is one, a GPU that torch can use and a compiler for launchers are needed too."""
    code, checks = doctor(PATH=str(programs), CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert checks["NVIDIA driver"]["ok"]
    assert not checks["GPU"]["ok"]
    assert not checks["C compiler"]["ok"]
    assert "gcc" in checks["C compiler"]["found"]
    assert "apt-get install gcc" in checks["C compiler"]["advice"]
    sound = Check("all else", True, "")
    driver = Check("NVIDIA driver", True, "", need="optional")
    for name in ("GPU", "C compiler"):
        lacking = Check(name, False, "", need="gpu")
        assert not usable([sound, driver, lacking])
        assert usable([sound, lacking])


@pytest.mark.fault("N9")
def test_a_compiler_is_tried_as_triton_uses_it(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is there and builds nothing is no compiler."""
    real = shutil.which("gcc") or shutil.which("clang")
    for name, does in (("real-cc", f'exec {real} "$@"'), ("idle-cc", ""), ("broken-cc", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for name in ("real-cc", "idle-cc", "broken-cc", "no-cc"):
        monkeypatch.setenv("CC", str(programs / name))
        assert look_for("C compiler").ok == (name == "real-cc")


@pytest.mark.parametrize(
    "modules",
    [("xgboost",), ("triton",), ("torch",), ("numpy",), ("pyarrow", "platformdirs"), ("msgspec",)],
    ids=" and ".join,
)
def test_a_missing_package_is_named(tmp_path: Path, modules: tuple[str, ...]) -> None:
    code, checks = doctor(PYTHONPATH=hide(tmp_path / "hidden", modules))
    assert code == 1
    for module in modules:
        check = checks["Triton" if module == "triton" else module]
        assert not check["ok"]
        assert module in check["found"]
        assert "pip install" in check["advice"]


@pytest.mark.fault("B52")
def test_the_interpreter_would_be_launched_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "true", "0", "off", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert look_for("TRITON_INTERPRET").ok == (value not in ("1", "true"))


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says so when it is asked for a GPU."""

    def refuse(*_: object) -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", refuse)
    found = look_for("GPU")
    assert not found.ok
    assert "too old" in found.found


@pytest.mark.fault("B22")
@pytest.mark.parametrize(
    ("variable", "check"),
    [("COSTMODEL_CACHE_DIR", "cache"), ("TRITON_CACHE_DIR", "Triton's cache")],
)
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, check: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    found = look_for(check)
    assert not found.ok
    assert variable in found.advice
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_people_get_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver: usable without
    done = run("doctor")
    assert done.exit_code == 0
    assert "C compiler" in done.stdout
    assert "usable" in done.stderr
