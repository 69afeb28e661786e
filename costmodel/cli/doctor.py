"""What a set-up has and what it lacks, in the order in which things depend on each other.

Nothing is launched and nothing raises: a check that cannot be made is a check that failed.
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
from pathlib import Path

from costmodel.cli.doctor_check import Check, attempt, imported, line
from costmodel.cli.doctor_files import (
    check_artifacts,
    check_cache,
    check_datasets,
    check_kernels,
    check_model,
    check_named_model,
    check_triton_cache,
)
from costmodel.errors import CostModelError

__all__ = ["Check", "diagnose", "usable"]


def diagnose(model: Path | None = None) -> list[Check]:
    """All checks. Asks the driver which GPU there is, and nothing more.

    Args:
        model: folder of a model to look at, beside the shipped ones; it must be usable.
    """
    return [
        _python(),
        _module("numpy", "pip install numpy"),
        _torch(),
        _triton(),
        _tool("ptxas"),
        _tool("cuobjdump"),
        _module("xgboost", "pip install xgboost-cpu (or xgboost: either serves)"),
        _module("pyarrow", "pip install pyarrow"),
        _module("sklearn", "pip install scikit-learn"),
        _module("joblib", "pip install joblib"),
        _module("msgspec", "pip install msgspec"),
        _module("platformdirs", "pip install platformdirs"),
        _driver(),
        _gpu(),
        _compiler(),
        _headers(),
        _interpreter(),
        attempt("model", check_model),
        *([] if model is None else [attempt(f"model {model}", lambda: check_named_model(model))]),
        attempt("kernels", check_kernels),
        attempt("artifacts", check_artifacts),
        attempt("cache", check_cache),
        attempt("Triton's cache", check_triton_cache),
        attempt("datasets", check_datasets),
    ]


def usable(checks: list[Check]) -> bool:
    """Whether costmodel can be used: on the GPU where there is a driver, else without one."""
    has_driver = any(
        check.name == "NVIDIA driver" and (check.ok or check.need == "gpu") for check in checks
    )
    needs = {"always", "gpu"} if has_driver else {"always"}
    return all(check.ok for check in checks if check.need in needs)


def _python() -> Check:
    ok = (3, 11) <= sys.version_info < (3, 14)
    advice = "" if ok else "use Python 3.11, 3.12 or 3.13"
    return Check("Python", ok, f"{platform.python_version()} ({sys.executable})", advice)


def _module(name: str, advice: str) -> Check:
    module, reason = imported(name)
    if module is None:
        return Check(name, False, reason, advice)
    return Check(name, True, str(module.__version__))


def _torch() -> Check:
    torch, reason = imported("torch")
    if torch is None:
        return Check("torch", False, reason, "pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", True, f"{torch.__version__}, {build}")


def _triton() -> Check:
    triton, reason = imported("triton")
    advice = "pip install --no-deps triton==3.6.0 (a CUDA build of torch brings its own)"
    if triton is None:
        return Check("Triton", False, reason, advice)
    version = str(triton.__version__)
    old = [int(part) for part in version.split(".")[:2]] < [3, 6]
    return Check("Triton", not old, version, f"3.6 or newer is needed: {advice}" if old else "")


def _tool(name: str) -> Check:
    """A program that Triton's wheel carries."""
    advice = "reinstall Triton: its wheel carries this program"
    try:
        from triton import knobs

        tool = getattr(knobs.nvidia, name)
        return Check(name, True, f"{tool.version} ({tool.path})")
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return Check(name, False, line(error), advice)


def _driver() -> Check:
    """The driver answers through nvidia-smi, which comes with it."""
    advice = "only for timing and matmul: install NVIDIA's driver, and show the GPU to this process"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        return Check("NVIDIA driver", False, "nvidia-smi is not on the PATH", advice, "optional")
    except (subprocess.SubprocessError, OSError) as error:
        return Check("NVIDIA driver", False, line(error), advice, "optional")
    found = "; ".join(done.stdout.splitlines())
    least = _least_driver()
    if any(version < least for version in _driver_versions(done.stdout)):
        wanted = ".".join(map(str, least))
        advice = f"update NVIDIA's driver to {wanted} or newer: the installed CUDA needs it"
        return Check("NVIDIA driver", False, f"{found}: too old", advice, "gpu")
    return Check("NVIDIA driver", True, found, need="optional")


# NVIDIA, CUDA Compatibility: the oldest driver of each major version of CUDA.
_LEAST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def _least_driver() -> tuple[int, int]:
    """What the CUDA of torch and that of Triton's ptxas need, as far as they can be asked."""
    versions = []
    with suppress(ImportError, OSError, AttributeError):
        versions.append(str(importlib.import_module("torch").version.cuda or ""))
    with suppress(ImportError, OSError, AttributeError, RuntimeError):
        versions.append(str(importlib.import_module("triton").knobs.nvidia.ptxas.version))
    majors = [int(v.split(".")[0]) for v in versions if v.split(".")[0].isdecimal()]
    return max((_LEAST_DRIVERS.get(major, (0, 0)) for major in majors), default=(0, 0))


def _driver_versions(listing: str) -> list[tuple[int, int]]:
    """Of each GPU, from what nvidia-smi lists; what cannot be read is left out."""
    found = (re.search(r",\s*(\d+)\.(\d+)", line) for line in listing.splitlines())
    return [(int(m[1]), int(m[2])) for m in found if m]


def _gpu() -> Check:
    from costmodel.hardware.target import Target

    name = "GPU"
    torch, reason = imported("torch")
    if torch is None:
        return Check(name, False, reason, "install torch first", "gpu")
    if torch.version.cuda is None:
        advice = "with a GPU, install a CUDA build of torch: pip install 'torch==2.11.*'"
        return Check(name, False, "this torch is a CPU build", advice, "gpu")
    try:
        device = Target.current().device
    except (CostModelError, RuntimeError) as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = "check nvidia-smi" + (f"; CUDA_VISIBLE_DEVICES={hidden!r}" if hidden else "")
        return Check(name, False, line(error), advice, "gpu")
    return Check(name, True, f"{device.product} ({device.name}, {device.capability})", need="gpu")


def _compiler() -> Check:
    """Triton builds its launcher with CC, else gcc, else clang (triton/runtime/build.py)."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    advice = "Triton's launcher needs one: apt-get install gcc, or set CC to a compiler"
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return Check("C compiler", False, f"none of {', '.join(names)} found", advice, "gpu")
    return Check("C compiler", True, path, need="gpu")


def _headers() -> Check:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    if path.is_file():
        return Check("Python.h", True, str(path), need="gpu")
    advice = "Triton's launcher includes it: apt-get install python3-dev"
    return Check("Python.h", False, f"{path} is not there", advice, "gpu")


def _interpreter() -> Check:
    name, value = "TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "")
    if value.lower() in ("", "0", "false", "off", "no", "n"):
        return Check(name, True, "not set", need="gpu")
    return Check(name, False, f"set to {value}: kernels would be interpreted", "unset it", "gpu")
