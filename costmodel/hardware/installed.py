"""The installed builds of Triton and the driver, and the compiler's settings; starts nothing.

Two builds of one version, such as a vendor's, may compile differently, and a driver may load or
clock differently. So a choice that rests on timings is valid for one build and one driver.
"""

import ctypes
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARY = "triton/_C/libtriton.so"
# Knobs of Triton that change no code: they print, store, permit or find something.
_HARMLESS = """
    allow_non_constexpr_globals always_compile cuobjdump dump_ir dump_ptxas_log front_end_debugging
    interpret libcuda_path nvdisasm store_binary_only
"""


@cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, such as ``570.86.15``.

    If it cannot be read, return the driver's CUDA version, such as ``CUDA 12080``; empty without a
    driver.
    """
    try:
        if found := _kernel_module(_DRIVER.read_text(errors="replace")):
            return found
    except OSError:  # not Linux, or a container that hides it
        pass
    return f"CUDA {number}" if (number := driver_cuda()) else ""


def driver_cuda() -> int:
    """Return the driver's CUDA version, such as 12080; 0 without a driver."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no driver, or a stand-in of it
        return 0
    return number.value


def _kernel_module(text: str) -> str:
    """Find the version in the kernel module's own description; empty if there is none."""
    found = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else ""


@cache
def triton_build() -> str:
    """Return a hash of the installed Triton's library, as its package lists it; else its size.

    Empty where no Triton is installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent.parent
    try:
        # Path.glob() would look up what each entry is.
        infos = [x for x in os.listdir(folder) if "triton" in x and x.endswith(".dist-info")]
        for record in filter(Path.is_file, (folder / x / "RECORD" for x in sorted(infos))):
            text = record.read_text(encoding="utf-8", errors="replace")  # lists the files' hashes
            line = rf"^{re.escape(_LIBRARY)},sha256=([\w-]+),"
            if found := re.search(line, text, re.MULTILINE):
                return found[1]
        return f"{(folder / _LIBRARY).stat().st_size} bytes"
    except OSError:
        return ""


def compiler_settings() -> dict[str, str | None]:
    """Return the settings of Triton and ptxas that may change code, by environment variable.

    They are those in the keys of Triton's own cache, and its knobs, set in Python or by a variable.

    Returns:
        values as text; None for a knob that has its default.
    """
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.nvidia.compiler import CUDAOptions

    found = {
        name: None if value == "false" else value  # Triton's word for a switch that is off
        for name, value in get_cache_invalidating_env_vars().items()
    }
    for group in (knobs.compilation, knobs.language, knobs.nvidia, knobs.runtime):
        for name, knob in group.knob_descriptors.items():
            if name in _HARMLESS.split():
                continue
            if hasattr(knob, "default_path"):  # a tool: reading the knob would start it
                value = vars(group).get(name, os.environ.get(knob.key))
            else:
                value = getattr(group, name)
            default = getattr(knob, "default_path", getattr(knob, "default", None))
            text = f"{value:d}" if isinstance(value, bool) else str(value)
            found[knob.key] = None if value in (None, "", default) else text
    # Triton reads these variables only once: PTXAS_OPTIONS when it is imported.
    found["PTXAS_OPTIONS"] = CUDAOptions.ptx_options or None
    found["TRITON_INSTRUMENTATION_MODE"] = knobs.compilation.instrumentation_mode or None
    return found


def interpreter_setting() -> str:
    """Return ``TRITON_INTERPRET`` if it switches Triton's interpreter on, else an empty text."""
    value = os.environ.get("TRITON_INTERPRET", "")
    return "" if value.lower() in ("", "0", "false", "off", "no") else value
