"""Copies of the package whose kernels are edited: for faults, and for changes of a kernel.

A child process that finds such a copy first on its path runs the edited kernels, and nothing of
the code under test is replaced. ``SupervisedWorker`` gives its children the path of the parent, so
``monkeypatch.syspath_prepend(copy)`` is all that a test of the runner needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import costmodel

__all__ = ["FAULTS", "copy_package"]

_MARK = '    tl.device_assert(GROUP_M > 0, "GROUP_M must be positive")\n'

_FAULTS = """
    if BLOCK_M == 32 and BLOCK_N == 32:
        if BLOCK_K == 16:  # writes the left half of C only
            N = N // 2
        elif BLOCK_K == 32:  # a wild write, at once
            tl.store(c_ptr + (1 << 45), 0.0)
        elif BLOCK_K == 64:  # a wild write in the tenth launch, counted behind the arrivals
            if tl.program_id(0) == 0:
                launches = tl.atomic_add(arrivals_ptr + 1500, 1)
                if launches == 9:
                    tl.store(c_ptr + (1 << 45), 0.0)
        elif BLOCK_K == 128:  # never ends
            flag = tl.load(a_ptr, volatile=True)
            while flag == flag:
                flag = tl.load(a_ptr, volatile=True)
        elif BLOCK_K == 256:  # right, after some 50 ms: each load waits for the one before
            index = 0
            for _ in range(200_000):
                flag = tl.load(a_ptr + index, volatile=True)
                index = (flag != flag).to(tl.int32)
            a_ptr += index
"""

FAULTS: Mapping[str, tuple[str, str]] = {"kernels/pointer.py": (_MARK, _MARK + _FAULTS)}
"""Faults of the pointer kernel, for tiles of 32x32 only; BLOCK_K chooses which.

The tenth-launch one wants split-K, after a launch of the same process that had over 1,501 tiles.
"""


def copy_package(folder: Path, edits: Mapping[str, tuple[str, str]]) -> Path:
    """Copy ``costmodel`` into a folder, with one text of some files replaced by another.

    Args:
        edits: by path inside the package: a text that is there once or more, and its replacement
            (of the first one).

    Returns:
        The folder, which is to come first on a path.
    """
    package = Path(costmodel.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "_models")
    shutil.copytree(package, folder / "costmodel", ignore=ignored)
    for name, (old, new) in edits.items():
        path = folder / "costmodel" / name
        text = path.read_text()
        assert old in text, f"{name} has changed: {old!r} is not there any more"
        path.write_text(text.replace(old, new, 1))
    return folder
