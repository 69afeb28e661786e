"""What a set-up has and what it lacks, in the order in which things depend on each other.

Nothing is launched and nothing raises: a check that cannot be made is a check that failed.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel.errors import CostModelError

__all__ = ["Check", "diagnose", "usable"]

Need = Literal["always", "gpu", "optional"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked for.

    Attributes:
        name: what.
        ok: whether it is there.
        found: what was found, or what is wrong.
        advice: what to do about it; empty where it is ok.
        need: without it nothing works (``always``), nothing runs on a GPU (``gpu``), or only
            something is left out (``optional``).
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    need: Need = "always"


def diagnose() -> list[Check]:
    """All checks. Asks the driver which GPU there is, and nothing more."""
    return [
        _python(),
        _module("numpy", "pip install numpy"),
        _torch(),
        _triton(),
        _tool("ptxas"),
        _tool("cuobjdump"),
        _module("xgboost", "pip install xgboost-cpu (or xgboost: either serves)"),
        _module("pyarrow", "pip install pyarrow"),
        _driver(),
        _gpu(),
        _compiler(),
        _headers(),
        _interpreter(),
        _model(),
        _artifacts(),
        _cache(),
        _datasets(),
    ]


def usable(checks: list[Check]) -> bool:
    """Whether costmodel can be used: on the GPU where there is a driver, else without one."""
    has_driver = any(check.name == "NVIDIA driver" and check.ok for check in checks)
    needs = {"always", "gpu"} if has_driver else {"always"}
    return all(check.ok for check in checks if check.need in needs)


def _python() -> Check:
    ok = (3, 11) <= sys.version_info < (3, 14)
    advice = "" if ok else "use Python 3.11, 3.12 or 3.13"
    return Check("Python", ok, f"{platform.python_version()} ({sys.executable})", advice)


def _module(name: str, advice: str) -> Check:
    module, reason = _import(name)
    if module is None:
        return Check(name, False, reason, advice)
    return Check(name, True, str(module.__version__))


def _torch() -> Check:
    torch, reason = _import("torch")
    if torch is None:
        return Check("torch", False, reason, "pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", True, f"{torch.__version__}, {build}")


def _triton() -> Check:
    triton, reason = _import("triton")
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
        return Check(name, False, _line(error), advice)


def _driver() -> Check:
    """The driver answers through nvidia-smi, which comes with it."""
    advice = "only for timing and matmul: install NVIDIA's driver, and show the GPU to this process"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        return Check("NVIDIA driver", False, "nvidia-smi is not on the PATH", advice, "optional")
    except (subprocess.SubprocessError, OSError) as error:
        return Check("NVIDIA driver", False, _line(error), advice, "optional")
    return Check("NVIDIA driver", True, "; ".join(done.stdout.splitlines()), need="optional")


def _gpu() -> Check:
    from costmodel.target import Target

    name = "GPU"
    torch, reason = _import("torch")
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
        return Check(name, False, _line(error), advice, "gpu")
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


def _model() -> Check:
    from costmodel.models import load, shipped_models
    from costmodel.target import Target

    shipped = shipped_models()
    advice = "rules of thumb answer; train one: costmodel collect, then costmodel train"
    wanted = list(shipped)
    with suppress(CostModelError, ImportError, RuntimeError):  # no GPU: any model will do
        wanted = [Target.current().device.name]
    try:
        found = [f"{name} ({load(shipped[name]).hash})" for name in wanted if name in shipped]
    except (CostModelError, ImportError) as error:
        return Check("model", False, _line(error), advice, "optional")
    if not found:
        lacking = f"none for {', '.join(wanted) or 'any target'}"
        return Check("model", False, f"{lacking} (shipped: {', '.join(shipped) or 'none'})",
                     advice, "optional")  # fmt: skip
    return Check("model", True, ", ".join(found), need="optional")


def _artifacts() -> Check:
    """Whether the PTX head can answer with the installed Triton."""
    from costmodel.models import known_artifacts, load, shipped_models
    from costmodel.target import Target

    name, advice = "artifacts", "PTX is not seen in ranking; costmodel compile M N K --table"
    counts, toolchain = [], ""
    try:
        for device, path in shipped_models().items():
            target = Target.named(device)
            toolchain = f"Triton {target.toolchain.triton}, ptxas {target.toolchain.ptxas}"
            counts.append(f"{len(known_artifacts(load(path), target))} for {device}")
    except (CostModelError, ImportError, AttributeError, RuntimeError, OSError) as error:
        return Check(name, False, _line(error), advice, "optional")
    ok = any(not count.startswith("0 ") for count in counts)
    found = f"{', '.join(counts) or 'none'}; {toolchain}"
    return Check(name, ok, found, "" if ok else advice, "optional")


def _cache() -> Check:
    from costmodel.folders import VARIABLE, cache_directory

    name = "cache"
    advice = f"winners last for one process only; set {VARIABLE} to a folder that can be written"
    try:
        path = cache_directory()
        folder = next(p for p in (path, *path.parents) if p.exists())
        with tempfile.TemporaryFile(dir=folder):
            return Check(name, True, f"{path} can be written", need="optional")
    except (CostModelError, OSError) as error:
        return Check(name, False, _line(error), advice, "optional")


def _datasets() -> Check:
    from costmodel.shipped import checkout

    advice = "only for train, evaluate and full replays: use a checkout, or --data DIR"
    try:
        folder = checkout("datasets")
    except CostModelError as error:
        return Check("datasets", False, _line(error), advice, "optional")
    names = sorted(card.parent.name for card in folder.glob("*/card.json"))
    found = f"{', '.join(names) or 'none'} in {folder}"
    return Check("datasets", bool(names), found, "" if names else advice, "optional")


def _import(name: str) -> tuple[Any, str]:
    """The module, or None and why not; a broken library counts as a missing one."""
    try:
        return importlib.import_module(name), ""
    except (ImportError, OSError) as error:
        return None, _line(error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
