"""``costmodel doctor``: what this set-up has and what it lacks.

Nothing is launched and nothing raises: a check that cannot be made is one that failed.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.doctor_check import Check, Look, Missing
from costmodel.cli.doctor_files import looks_at_files
from costmodel.cli.options import AsJson
from costmodel.errors import CostModelError
from costmodel.hardware.installed import interpreter_setting
from costmodel.hardware.target import Target

__all__ = ["Check", "diagnose", "doctor", "usable"]

# NVIDIA, CUDA Compatibility: the oldest driver of each major version of CUDA.
_LEAST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def doctor(
    model: Annotated[Path | None, typer.Option(help="Folder of a model to look at too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this set-up has and lacks; exit code 0 if costmodel can be used on it."""
    checks = diagnose(model)
    ok = usable(checks)
    if as_json:
        output.print_json({"usable": ok, "checks": [asdict(check) for check in checks]})
    else:
        rows = [[c.name, "ok" if c.ok else "missing", c.found, c.advice] for c in checks]
        output.print_table("costmodel doctor", ["what", "", "found", "what to do"], rows)
        output.note("usable" if ok else "not usable yet: see what is missing above")
    raise typer.Exit(0 if ok else 1)


def diagnose(model: Path | None = None, only: str | None = None) -> list[Check]:
    """Make all checks, in the order in which they depend on each other.

    Args:
        model: folder of a model to look at, beside the shipped ones; it must be usable.
        only: make the check of this name alone.
    """
    looks = [*_LOOKS, *looks_at_files(model)]
    return [look.check() for look in looks if only in (None, look.name)]


def usable(checks: list[Check]) -> bool:
    """Return True if costmodel can be used: on the GPU if there is a driver, else without one."""
    has_driver = any(
        check.name == "NVIDIA driver" and (check.ok or check.need == "gpu") for check in checks
    )
    needs = {"always", "gpu"} if has_driver else {"always"}
    return all(check.ok for check in checks if check.need in needs)


def _python() -> str:
    found = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info < (3, 14):
        raise Missing(found)
    return found


def _module(name: str) -> str:
    return str(importlib.import_module(name).__version__)


def _torch() -> str:
    torch = importlib.import_module("torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}"


def _triton() -> str:
    version = _module("triton")
    if [int(part) for part in version.split(".")[:2]] < [3, 6]:
        raise Missing(version, f"3.6 or newer is needed: {_TRITON_ADVICE}")
    return version


def _tool(name: str) -> str:
    tool = _nvidia_tool(name)
    return f"{tool.version} ({tool.path})"


def _nvidia_tool(name: str) -> Any:
    """Return a program that Triton's wheel carries."""
    return getattr(importlib.import_module("triton").knobs.nvidia, name)


def _driver() -> str:
    """Ask nvidia-smi, which comes with the driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        raise Missing("nvidia-smi is not on the PATH") from None
    found = "; ".join(done.stdout.splitlines())
    versions = re.findall(r",\s*(\d+)\.(\d+)", done.stdout)
    least = _least_driver()
    if any((int(major), int(minor)) < least for major, minor in versions):
        wanted = ".".join(map(str, least))
        advice = f"update NVIDIA's driver to {wanted} or newer: the installed CUDA needs it"
        raise Missing(f"{found}: too old", advice, need="gpu")
    return found


def _least_driver() -> tuple[int, int]:
    """Return the oldest driver that fits the CUDA of torch and of Triton's ptxas, if known."""
    versions = []
    with suppress(ImportError, OSError, AttributeError):
        versions.append(str(importlib.import_module("torch").version.cuda or ""))
    with suppress(ImportError, OSError, AttributeError, RuntimeError):
        versions.append(str(_nvidia_tool("ptxas").version))
    majors = [int(v.split(".")[0]) for v in versions if v.split(".")[0].isdecimal()]
    return max((_LEAST_DRIVERS.get(major, (0, 0)) for major in majors), default=(0, 0))


def _gpu() -> str:
    if importlib.import_module("torch").version.cuda is None:
        advice = "with a GPU, install a CUDA build of torch: pip install 'torch==2.11.*'"
        raise Missing("this torch is a CPU build", advice)
    try:
        device = Target.current().device
    except (CostModelError, RuntimeError) as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = f"check nvidia-smi; CUDA_VISIBLE_DEVICES={hidden!r}" if hidden else ""
        raise Missing(f"{type(error).__name__}: {error}", advice) from None
    return f"{device.product} ({device.name}, {device.capability})"


def _compiler() -> str:
    """Look for CC, else gcc, else clang, as Triton does (triton/runtime/build.py)."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise Missing(f"none of {', '.join(names)} found")
    return path


def _headers() -> str:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    if not path.is_file():
        raise Missing(f"{path} is not there")
    return str(path)


def _interpreter() -> str:
    if value := interpreter_setting():
        raise Missing(f"set to {value}: kernels would be interpreted")
    return "not set"


_TRITON_ADVICE = "pip install --no-deps triton==3.6.0 (a CUDA build of torch brings its own)"
_TOOL_ADVICE = "reinstall Triton: its wheel carries this program"
_PACKAGES = {
    "xgboost": "pip install xgboost-cpu (or xgboost: either serves)",
    "pyarrow": "pip install pyarrow",
    "sklearn": "pip install scikit-learn",
    "joblib": "pip install joblib",
    "msgspec": "pip install msgspec",
    "platformdirs": "pip install platformdirs",
}
_LOOKS = (
    Look("Python", "always", _python, "use Python 3.11, 3.12 or 3.13"),
    Look("numpy", "always", partial(_module, "numpy"), "pip install numpy"),
    Look("torch", "always", _torch, "pip install torch"),
    Look("Triton", "always", _triton, _TRITON_ADVICE),
    *(Look(name, "always", partial(_tool, name), _TOOL_ADVICE) for name in ("ptxas", "cuobjdump")),
    *(Look(name, "always", partial(_module, name), pip) for name, pip in _PACKAGES.items()),
    Look("NVIDIA driver", "optional", _driver,
         "only for timing and matmul: install NVIDIA's driver, and show the GPU to this process"),
    Look("GPU", "gpu", _gpu, "check nvidia-smi"),
    Look("C compiler", "gpu", _compiler,
         "Triton's launcher needs one: apt-get install gcc, or set CC to a compiler"),
    Look("Python.h", "gpu", _headers,
         "Triton's launcher includes it: apt-get install python3-dev"),
    Look("TRITON_INTERPRET", "gpu", _interpreter, "unset it"),
)  # fmt: skip
