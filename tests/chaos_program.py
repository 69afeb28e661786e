"""``costmodel collect`` with a fault at a moment: the n-th of what the fault waits for."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import costmodel.cli
from costmodel.measure.replay import ReplayRunner

_fsync, _replace, _unlink, _measure = os.fsync, os.replace, os.unlink, ReplayRunner.measure


def nth(number: int, fault: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Do the plain thing, but the n-th time the fault."""
    left = number

    def do(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        return (plain if left else fault)(*args, **kwargs)

    return do


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_written(fd: int) -> None:
    os.ftruncate(fd, os.fstat(fd).st_size // 2)
    die()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def signalled(number: signal.Signals) -> Callable[..., None]:
    def replace(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), number)
        _replace(*args, **kwargs)

    return replace


def broken(*_: object) -> None:
    raise ZeroDivisionError("a bug")


def main(fault: str, number: int, arguments: list[str]) -> None:
    """Set the fault, then run the command."""
    match fault:
        case "half":
            os.fsync = nth(number, die_half_written, _fsync)
        case "written":
            os.replace = nth(number, die, _replace)
        case "removing":
            os.unlink = nth(number, die, _unlink)
        case "timing":
            ReplayRunner.measure = nth(number, die, _measure)  # type: ignore[method-assign]
        case "full":
            os.fsync = nth(number, full, _fsync)
        case "bug":
            ReplayRunner.measure = nth(number, broken, _measure)  # type: ignore[method-assign]
        case "SIGINT" | "SIGTERM":
            os.replace = nth(number, signalled(signal.Signals[fault]), _replace)
    sys.argv = ["costmodel", "collect", *arguments]
    costmodel.cli.main()


if __name__ == "__main__":
    # A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
