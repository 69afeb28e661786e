"""``costmodel doctor``: what this set-up has and what it lacks.

Toolchain, launcher, model, artifacts and cache are checked with the functions that tuning calls, so
doctor confirms only what it has tried. No kernel is launched and nothing raises: a check that
cannot be made counts as failed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from warnings import catch_warnings

from typer import Exit, Option

from costmodel.cli.common import DEFAULT_TARGET, AsJson, OptionalPath, answer
from costmodel.errors import CostModelError, host_errors
from costmodel.files import CACHE_VARIABLE, cache_directory
from costmodel.gemm.workload import Workload
from costmodel.hardware.installed import interpreter_setting
from costmodel.hardware.target import Target, Toolchain

if TYPE_CHECKING:
    from costmodel.tuning.ranking import Ranking

Need = Literal["always", "gpu", "optional"]
"""Effect if it is missing: nothing works; nothing runs on a GPU; or only some part is left out."""
_Look = tuple[str, Need, Callable[[], str], str]

_SQUARE = Workload.dense(4096, 4096, 4096)  # every model has learned this kind
_UPGRADE = "rules of thumb answer; upgrade XGBoost: pip install -U xgboost-cpu"
_TRITON_ADVICE = "pip install --no-deps triton==3.6.0 (a CUDA build of torch brings its own)"
_TOOL_ADVICE = "reinstall Triton: its wheel carries this program"
_EMPTY_MODULE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "costmodel_doctor", 0, -1, 0};
PyMODINIT_FUNC PyInit_costmodel_doctor(void) { return PyModule_Create(&module); }
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked for: is it there, what was found, and what to do.

    ``advice`` is empty if the check is ok.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    need: Need = "always"


class _Missing(Exception):
    """Raised by a look: says what is wrong, and may give other advice than the usual one."""

    def __init__(self, found: str, advice: str = ""):
        super().__init__(found)
        self.advice = advice


def doctor(
    model: Annotated[OptionalPath, Option(help="Folder of a model to check too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this set-up has and lacks; exit code 0 if costmodel can be used on it."""
    checks = diagnose(model)
    ok = usable(checks)
    rows = [[c.name, "ok" if c.ok else "missing", c.found, c.advice] for c in checks]
    answer(
        as_json,
        {"usable": ok, "checks": [asdict(check) for check in checks]},
        ("costmodel doctor", ["what", "", "found", "what to do"], rows),
        notes=["usable" if ok else "not usable yet: see what is missing above"],
    )
    raise Exit(not ok)


def diagnose(model: OptionalPath = None, only: str | None = None) -> list[Check]:
    """Make all checks, in the order in which they depend on each other.

    Args:
        model: folder of a model to look at, beside the shipped ones; it must be usable.
        only: make the check of this name alone.
    """
    return [_check(*look) for look in _looks(model) if only in (None, look[0])]


def usable(checks: list[Check]) -> bool:
    """Return True if costmodel can be used: on the GPU if there is a driver, else without one."""
    has_driver = any(check.name == "NVIDIA driver" and check.ok for check in checks)
    needs = {"always", "gpu"} if has_driver else {"always"}
    return all(check.ok for check in checks if check.need in needs)


def _check(name: str, need: Need, find: Callable[[], str], advice: str) -> Check:
    """Look for one thing; any error is a check that failed."""
    try:
        return Check(name, True, find(), need=need)
    except _Missing as missing:
        return Check(name, False, str(missing), missing.advice or advice, need)
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Check(name, False, found, advice, need)


def _looks(model: OptionalPath) -> list[_Look]:
    """Return all looks: name, need, the function that looks, and advice."""
    tuner = _Tuner()
    named: list[_Look] = [] if model is None else [
        (f"model {model}", "always", partial(tuner.named_model, model),
         "name a folder that costmodel train wrote, or train it again"),
    ]  # fmt: skip
    return [
        ("Python", "always", lambda: f"{platform.python_version()} ({sys.executable})", ""),
        ("torch", "always", _torch, "pip install torch triton==3.6.0"),
        ("Triton", "always", _triton, _TRITON_ADVICE),
        ("ptxas", "always", tuner.ptxas, _TOOL_ADVICE),
        ("cuobjdump", "always", lambda: str(import_module("triton").knobs.nvidia.cuobjdump.path),
         _TOOL_ADVICE),
        ("xgboost", "always", partial(_module, "xgboost"),
         "pip install xgboost-cpu (or xgboost: either serves)"),
        ("sklearn", "always", partial(_module, "sklearn"), "pip install scikit-learn"),
        *((name, "always", partial(_module, name), f"pip install {name}")
          for name in ("numpy", "pyarrow", "joblib", "msgspec", "platformdirs")),
        ("NVIDIA driver", "optional", _driver,
         "only for timing and matmul: install NVIDIA's driver, and show the GPU to this process"),
        ("GPU", "gpu", tuner.gpu, "check nvidia-smi"),
        ("C compiler", "gpu", _compiler,
         "Triton's launcher needs it: apt-get install gcc python3-dev, or set CC to a compiler"),
        ("TRITON_INTERPRET", "gpu", _interpreter, "unset it"),
        ("model", "optional", tuner.model,
         "rules of thumb answer; train one: costmodel collect, then costmodel train"),
        *named,
        ("artifacts", "optional", tuner.artifacts,
         "those without are ranked by the configurations alone; if kernels were changed: "
         "restore them, or collect and train again; if kernels are new: collect and train"),
        ("cache", "optional", _cache, "winners last for one process only; set "
         f"{CACHE_VARIABLE} to a folder that can be written"),
        ("Triton's cache", "gpu", _triton_cache,
         "nothing compiles; set TRITON_CACHE_DIR to a folder that can be written"),
    ]  # fmt: skip


# --- The machine ----------------------------------------------------------------------------------


def _module(name: str) -> str:
    return str(import_module(name).__version__)


def _torch() -> str:
    torch = import_module("torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}"


def _triton() -> str:
    version = _module("triton")
    if [int(part) for part in version.split(".")[:2]] < [3, 6]:
        raise _Missing(version, f"3.6 or newer is needed: {_TRITON_ADVICE}")
    return version


def _driver() -> str:
    """Ask nvidia-smi, which comes with the driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise _Missing("nvidia-smi is not on the PATH") from None
    return "; ".join(done.stdout.splitlines())


def _compiler() -> str:
    """Build an empty module as Triton builds a kernel's launcher, in a cache of its own."""
    from triton import knobs
    from triton.runtime.build import compile_module_from_src

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), host_errors():
        knobs.cache.dir = folder
        compile_module_from_src(_EMPTY_MODULE, "costmodel_doctor")
    return os.environ.get("CC") or shutil.which("gcc") or "clang"


def _interpreter() -> str:
    if value := interpreter_setting():
        raise _Missing(f"set to {value}: kernels would be interpreted")
    return "not set"


# --- What tuning goes by --------------------------------------------------------------------------


class _Tuner:
    """Looks with the calls that tuning a square product makes; without a GPU, for the H100."""

    @cached_property
    def _here(self) -> Target | str:
        """This machine's target, or the reason why there is none, with the warnings of torch."""
        with catch_warnings(record=True, action="always") as told:
            try:
                return Target.current()
            except (CostModelError, RuntimeError) as error:
                return "; ".join(map(str, [error, *(warning.message for warning in told)]))

    @cached_property
    def _target(self) -> Target:
        return Target.named(DEFAULT_TARGET) if isinstance(self._here, str) else self._here

    @cached_property
    def _ranking(self) -> tuple[Ranking, str]:
        """The tuner's ranking, and the warnings that came with it."""
        from costmodel.tuning.ranking import rank

        with catch_warnings(record=True, action="always") as told:
            found = rank(_SQUARE, self._target)
        return found, "; ".join(str(warning.message) for warning in told)

    def gpu(self) -> str:
        if import_module("torch").version.cuda is None:
            raise _Missing(
                "this torch is a CPU build",
                "with a GPU, install a CUDA build of torch: pip install 'torch==2.11.*'",
            )
        if isinstance(self._here, str):
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            advice = f"check nvidia-smi; CUDA_VISIBLE_DEVICES={hidden!r}" if hidden else ""
            raise _Missing(self._here, advice)
        device = self._here.device
        return f"{device.product} ({device.name}, {device.capability})"

    def ptxas(self) -> str:
        return Toolchain.current(self._target.device.arch).ptxas

    def model(self) -> str:
        ranking, _ = self._ranking
        if not ranking.answered_by:
            raise _Missing(ranking.caveat, _UPGRADE if "XGBoost" in ranking.caveat else "")
        found = f"{ranking.model} ({ranking.model_hash}) for {self._target.device.name}"
        return f"{found}: {ranking.caveat}" if ranking.caveat else found

    def named_model(self, path: Path) -> str:
        from costmodel.models import load

        model = load(path)
        target = model.card.target if isinstance(self._here, str) else self._here
        if reason := model.why_not_usable(_SQUARE, target):
            raise _Missing(reason)
        return f"{model.name} ({model.hash}) for {model.card.target.device.name}"

    def artifacts(self) -> str:
        ranking, told = self._ranking
        if not ranking.answered_by or ranking.without_artifact:
            raise _Missing(
                ranking.answered_by or "no model", told and f"reinstall costmodel: {told}"
            )
        return ranking.answered_by


def _cache() -> str:
    """Write a result to the cache as tuning does, and delete it."""
    from costmodel.tuning.tuning_result import TuningResult
    from costmodel.tuning.winner_cache import WinnerCache

    path, key = cache_directory(), {"name": "doctor"}
    cache = WinnerCache(path)
    trial = TuningResult.unranked(_SQUARE, Target.named(DEFAULT_TARGET), "auto", None, "a trial")
    with catch_warnings(record=True, action="always") as told:
        if not cache.put(key, trial):
            raise _Missing("; ".join(str(warning.message) for warning in told))
    cache.discard(key)
    entries, unusable = cache.survey()
    if unusable:
        raise _Missing(
            f"{len(unusable)} of {len(unusable) + len(entries)} files in {path} are no entries",
            "costmodel cache verify; costmodel cache clear",
        )
    return f"{path} can be written, {len(entries)} winners"


def _triton_cache() -> str:
    """Write a file in Triton's cache, or where the cache would be made: binaries need it."""
    path = Path(import_module("triton").knobs.cache.dir)
    folder = next(p for p in (path, *path.parents) if p.exists())
    with tempfile.TemporaryFile(dir=folder):
        return f"{path} can be written"
