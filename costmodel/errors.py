"""The exceptions that costmodel raises on purpose.

::

    CostModelError
    ├── InvalidInput (ValueError)     an argument that cannot be used
    │   ├── ShapeError                ranks or sizes that do not fit together
    │   ├── LayoutError               `out` that cannot be written (overlapping, wrong strides)
    │   └── DeviceError               tensors on the CPU, or on several GPUs
    ├── UnsupportedDtype (TypeError)  a dtype, or a mix of dtypes, that no kernel has
    ├── GradientError (RuntimeError)  out= with a tensor that requires grad
    ├── IllegalConfig (ValueError)    a configuration that cannot run, with the reasons
    ├── UnknownTarget (LookupError)   a device that has no entry and cannot be asked
    ├── NoGpu (RuntimeError)          timing or launching was asked for without a usable GPU
    ├── CompileError (RuntimeError)   Triton or ptxas refused a configuration
    ├── LaunchError (RuntimeError)    the driver refused a launch
    ├── HostError                     no folder, process or C compiler to compile or time with
    ├── RankError (RuntimeError)      ranks of a process group that cannot decide together
    ├── NotRecorded (LookupError)     a replay was asked for what was never measured
    ├── ModelError                    a model that cannot answer
    │   ├── NoModel (LookupError)     no model at this path, or one that cannot answer
    │   ├── SchemaMismatch (ValueError)  features of another schema
    │   └── MisreadModel (ValueError) XGBoost predicts other values than the one that saved it
    └── FileError
        ├── CorruptFile (ValueError)  truncated, foreign, or not what its name says
        ├── WrongVersion (ValueError) a schema version this release does not read
        ├── MixedData (ValueError)    rows of another device, toolchain or protocol
        └── MissingData (LookupError) a dataset, or another input, that is not there

Each message says what was wrong, what was expected, and what to do. The built-in class in
parentheses is a second base, so ``except ValueError`` works where a caller expects it to.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "CompileError",
    "CorruptFile",
    "CostModelError",
    "DeviceError",
    "FileError",
    "GradientError",
    "HostError",
    "IllegalConfig",
    "InvalidInput",
    "LaunchError",
    "LayoutError",
    "MisreadModel",
    "MissingData",
    "MixedData",
    "ModelError",
    "NoGpu",
    "NoModel",
    "NotRecorded",
    "RankError",
    "SchemaMismatch",
    "ShapeError",
    "UnknownTarget",
    "UnsupportedDtype",
    "WrongVersion",
]


class CostModelError(Exception):
    """The root of all exceptions that costmodel raises on purpose."""


class InvalidInput(CostModelError, ValueError):
    """An argument that cannot be used."""


class ShapeError(InvalidInput):
    """Ranks or sizes that do not fit together."""


class LayoutError(InvalidInput):
    """A tensor whose memory layout cannot be used, such as an ``out`` that overlaps itself."""


class DeviceError(InvalidInput):
    """Tensors on the CPU, or on several GPUs."""


class UnsupportedDtype(CostModelError, TypeError):
    """A dtype, or a mix of dtypes, that no kernel has."""


class GradientError(CostModelError, RuntimeError):
    """A result that would lose its gradient: ``out=`` where a tensor requires grad."""


class IllegalConfig(CostModelError, ValueError):
    """A configuration that cannot run on this workload and target."""


class UnknownTarget(CostModelError, LookupError):
    """A device name that has no entry."""


class NoGpu(CostModelError, RuntimeError):
    """Timing or launching was asked for, and no usable NVIDIA GPU is there."""


class CompileError(CostModelError, RuntimeError):
    """Triton or ptxas refused a configuration."""


class LaunchError(CostModelError, RuntimeError):
    """The driver refused to load or launch a kernel."""


class HostError(CostModelError):
    """The machine lacks what compiling or timing needs: a folder, a process, a C compiler."""


class RankError(CostModelError, RuntimeError):
    """The ranks of a process group cannot decide together: one failed, or they differ."""


class NotRecorded(CostModelError, LookupError):
    """A replay was asked for a measurement that its dataset does not hold."""


class ModelError(CostModelError):
    """A model that cannot answer."""


class NoModel(ModelError, LookupError):
    """No model for this target, or no file at this path."""


class SchemaMismatch(ModelError, ValueError):
    """Features of another schema than the model was trained on."""


class MisreadModel(ModelError, ValueError):
    """A model for which the installed XGBoost predicts other values than it should."""


class FileError(CostModelError):
    """A file that cannot be used."""


class CorruptFile(FileError, ValueError):
    """A truncated or foreign file."""


class WrongVersion(FileError, ValueError):
    """A schema version that this release does not read."""


class MixedData(FileError, ValueError):
    """Rows of another device, toolchain or protocol than the file holds."""


class MissingData(FileError, LookupError):
    """A dataset, or another file or folder to read, that is not there."""


# --- What the machine lacks -----------------------------------------------------------------------

_COMPILER = "install gcc or clang, and Python's headers, or name a C compiler by CC"
_FOLDERS = "name folders that can be written by TRITON_CACHE_DIR and TMPDIR"
_LIMITS = "raise the limit on memory, processes or open files (ulimit, or the container's)"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), f"free some space, or {_FOLDERS}"),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE), _LIMITS),
}
# Triton, Python and the supervisor raise these as RuntimeError or ImportError.
_TEXTS = {
    "Failed to find C compiler": _COMPILER,
    "failed to map segment": "TRITON_CACHE_DIR must name a folder that is not mounted noexec",
    "can't start new thread": _LIMITS,
    "Cannot find ptxas": "install Triton again, or name a ptxas by TRITON_PTXAS_PATH",
    "a worker process could not start": _LIMITS,
}


@contextmanager
def host_errors() -> Iterator[None]:
    """Raise :class:`HostError` for failures of files, folders, processes and the C compiler.

    Compiling and timing need them. A product needs none: it can be predicted, or computed by
    torch. All other exceptions propagate.
    """
    try:
        yield
    except Exception as error:
        advice = None if isinstance(error, CostModelError) else _advice(error)
        if advice is None:
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise HostError(f"kernels cannot be compiled or timed here: {text}: {advice}") from error


def _advice(error: Exception) -> str | None:
    """Return what to do about an error; None if the machine did not cause it."""
    import subprocess  # here, since `import costmodel` does not need it

    if isinstance(error, subprocess.CalledProcessError):
        return _COMPILER if "-shared" in error.cmd else f"check {error.cmd}"
    if isinstance(error, subprocess.SubprocessError):
        return _LIMITS
    if isinstance(error, OSError):
        return _ADVICE.get(error.errno or 0, f"{_FOLDERS}, and a C compiler by CC")
    if isinstance(error, RuntimeError | ImportError):
        return next((advice for text, advice in _TEXTS.items() if text in str(error)), None)
    return None
