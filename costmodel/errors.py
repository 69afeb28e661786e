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
    │   ├── NoModel (LookupError)     none for this target
    │   ├── SchemaMismatch (ValueError)  features of another schema
    │   └── MisreadModel (ValueError) an XGBoost that predicts otherwise than the one that saved it
    └── FileError
        ├── CorruptFile (ValueError)  truncated, foreign, or not what its name says
        ├── WrongVersion (ValueError) a schema version this release does not read
        ├── MixedData (ValueError)    rows of another device, schema or protocol
        └── MissingData (LookupError) a dataset or model that is not there

Each message says what was wrong, what was expected, and what to do. The built-in class in
parentheses is a second base, so ``except ValueError`` works where a caller expects it to.
"""

from __future__ import annotations

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
    """A model of which the installed XGBoost predicts something else than it should."""


class FileError(CostModelError):
    """A file that cannot be used."""


class CorruptFile(FileError, ValueError):
    """A truncated or foreign file."""


class WrongVersion(FileError, ValueError):
    """A schema version that this release does not read."""


class MixedData(FileError, ValueError):
    """Rows of another device, schema or protocol than the file holds."""


class MissingData(FileError, LookupError):
    """A dataset or a model directory that is not there."""
