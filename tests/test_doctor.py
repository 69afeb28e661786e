"""``doctor`` names what a set-up lacks. Set-ups are broken for real, none of it is mocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodel.doctor import _driver, usable

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


def hide(folder: Path, module: str) -> str:
    """A PYTHONPATH on which a module cannot be imported, as if it were not installed."""
    folder.mkdir()
    (folder / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}')")
    return str(folder)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder to be the whole PATH, with a driver's nvidia-smi in it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(FAKE_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def test_this_set_up_is_usable_without_a_gpu(tmp_path: Path) -> None:
    code, checks = doctor(PATH=str(tmp_path))
    assert code == 0
    for name in ("Python", "numpy", "torch", "Triton", "ptxas", "cuobjdump", "xgboost", "pyarrow"):
        assert checks[name]["ok"], checks[name]
    assert not checks["NVIDIA driver"]["ok"]
    assert "nvidia-smi" in checks["NVIDIA driver"]["found"]


def test_a_missing_compiler_is_named(programs: Path) -> None:
    code, checks = doctor(PATH=str(programs))
    assert code == 1  # there is a driver, so the launcher will be built
    assert not checks["C compiler"]["ok"]
    assert "gcc" in checks["C compiler"]["found"]
    assert "apt-get install gcc" in checks["C compiler"]["advice"]


def test_a_compiler_is_found_as_triton_finds_it(programs: Path) -> None:
    (programs / "my-cc").write_text("#!/bin/sh\n")
    (programs / "my-cc").chmod(0o755)
    assert doctor(PATH=str(programs), CC="my-cc")[1]["C compiler"]["ok"]
    assert not doctor(PATH=str(programs), CC="other-cc")[1]["C compiler"]["ok"]


@pytest.mark.parametrize(
    ("module", "check"),
    [("xgboost", "xgboost"), ("triton", "Triton"), ("torch", "torch"), ("numpy", "numpy"),
     ("pyarrow", "pyarrow"), ("platformdirs", "platformdirs")],
)  # fmt: skip
def test_a_missing_package_is_named(tmp_path: Path, module: str, check: str) -> None:
    code, checks = doctor(PYTHONPATH=hide(tmp_path / "hidden", module))
    assert code == 1
    assert not checks[check]["ok"]
    assert module in checks[check]["found"]
    assert "pip install" in checks[check]["advice"]


def test_the_interpreter_would_be_launched_instead(programs: Path) -> None:
    assert not doctor(TRITON_INTERPRET="1")[1]["TRITON_INTERPRET"]["ok"]
    assert doctor(TRITON_INTERPRET="0")[1]["TRITON_INTERPRET"]["ok"]


def test_a_driver_without_a_gpu_for_torch_is_not_usable(programs: Path) -> None:
    path = f"{programs}:{os.environ['PATH']}"
    code, checks = doctor(PATH=path, CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert checks["NVIDIA driver"]["ok"]
    assert not checks["GPU"]["ok"]


@pytest.mark.parametrize(
    ("cuda", "version", "least"),
    [(None, "570.86.15", ""), (None, "525.60.13", ""), (None, "470.57.02", "525.60"),
     (None, "525.50", "525.60"), (None, "unknown", ""), ("12.8", "470.57.02", "525.60"),
     ("13.0", "570.86.15", "580.65"), ("13.0", "580.65.06", "")],
)  # fmt: skip
def test_a_driver_that_is_too_old_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, version: str, least: str
) -> None:
    """Triton's ptxas is of CUDA 12, torch may be built with another."""
    smi = f"#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 999.9'\necho 'NVIDIA H100 80GB HBM3, {version}'"
    (programs / "nvidia-smi").write_text(smi)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr("torch.version.cuda", cuda)
    found = _driver()
    if least:
        assert not found.ok
        assert "too old" in found.found
        assert least in found.advice
        assert not usable([found]), "it is a driver nevertheless"
    else:
        assert found.ok


@pytest.mark.parametrize(
    ("variable", "check"),
    [("COSTMODEL_CACHE_DIR", "cache"), ("TRITON_CACHE_DIR", "Triton's cache")],
)
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, variable: str, check: str
) -> None:
    (tmp_path / "file").touch()
    _, checks = doctor(**{variable: str(tmp_path / "file" / "folder")})
    assert not checks[check]["ok"]
    assert variable in checks[check]["advice"]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_people_get_a_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "costmodel", "doctor"], cwd=ROOT, env={"PATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "C compiler" in done.stdout
    assert "usable" in done.stderr
