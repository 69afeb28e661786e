"""One error for what compiling and timing need of a machine and do not get.

Compiling and timing need folders to write to, processes, and a C compiler. A product needs none of
them: it can be predicted, or computed by torch.
"""

from __future__ import annotations

import errno
import logging
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from costmodel.errors import CostModelError, HostError
from costmodel.validation import one_line

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

log = logging.getLogger("costmodel")


@contextmanager
def host_errors() -> Iterator[None]:
    """Raise :class:`HostError` for failures of files, folders, processes and the C compiler.

    All other exceptions propagate.
    """
    try:
        yield
    except CostModelError:
        raise
    except (OSError, subprocess.SubprocessError, RuntimeError, ImportError) as error:
        advice = _advice(error)
        if advice is None:
            raise
        told = f"{type(error).__name__}: {one_line(error, 300)}"
        raise HostError(f"kernels cannot be compiled or timed here: {told}: {advice}") from error


def _advice(error: Exception) -> str | None:
    """Return what to do about an error; None if the machine did not cause it."""
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, list | tuple) else [error.cmd]
        return _COMPILER if "-shared" in command else f"check {Path(str(command[0])).name}"
    if isinstance(error, OSError):
        other = f"{_FOLDERS}, and a C compiler by CC"
        return _ADVICE.get(error.errno or 0, other)
    if isinstance(error, subprocess.SubprocessError):
        return _LIMITS
    return next((advice for text, advice in _TEXTS.items() if text in str(error)), None)


def warn_of_host(error: HostError) -> None:
    """Warn once in a process that products go on untuned."""
    global _warned
    with _lock:
        first, _warned = not _warned, True
    if first:
        warnings.warn(
            f"{error}; meanwhile products are predicted, or computed by torch",
            RuntimeWarning,
            stacklevel=6,
        )
    else:
        log.info("%s", error)


_lock = threading.Lock()
_warned = False
