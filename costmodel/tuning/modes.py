"""The names of the modes of choosing, and the mode of a call that names none."""

import os
from typing import Literal, get_args

from costmodel.errors import InvalidInput

Mode = Literal["auto", "predict", "topk", "exhaustive", "heuristic", "background", "never"]
MODES = get_args(Mode)

TUNING_MODES = tuple(mode for mode in MODES if mode not in ("background", "never"))
"""Those that say how one choice is made; the other two say when ``matmul`` may make one."""

VARIABLE = "COSTMODEL_MODE"
"""Environment variable with the mode of calls that name none."""

# What these find depends on timings, of this run or an earlier one.
_BY_TIMINGS = ("auto", "background", "never")

_set: str | None = None  # by `set_default_mode`
_read: str | None = None  # from the environment, once


def check_mode(mode: str) -> None:
    """Refuse, by InvalidInput, a mode that is not one of MODES."""
    if mode not in MODES:
        raise InvalidInput(f"mode={mode!r}: expected one of {', '.join(MODES)}")


def check_tuning_mode(mode: str) -> None:
    """Refuse, by InvalidInput, a mode that is not one of TUNING_MODES."""
    if mode not in TUNING_MODES:
        why = " says when matmul may tune, not how" if mode in MODES else ""
        raise InvalidInput(f"mode={mode!r}{why}: expected one of {', '.join(TUNING_MODES)} here")


def default_mode() -> str:
    """The mode of calls that name none: as set, else of ``COSTMODEL_MODE``, else ``auto``.

    The environment is read at the first call, and not again.

    Raises:
        InvalidInput: the variable names no mode.
    """
    global _read
    if _set is not None:
        return _set
    if _read is None:
        named = os.environ.get(VARIABLE, "") or "auto"
        if named not in MODES:
            raise InvalidInput(f"{VARIABLE}={named!r}: expected one of {', '.join(MODES)}")
        _read = named
    return _read


def chosen_mode(mode: str | None) -> str:
    """Return the mode of a call; None is the default one.

    Raises:
        InvalidInput: not one of MODES.
    """
    if mode is None:
        return default_mode()
    check_mode(mode)
    return mode


def set_default_mode(mode: str | None) -> None:
    """Set the mode of calls that name none; None: as the environment has it, read anew.

    Raises:
        InvalidInput: not one of MODES.
    """
    global _read, _set
    if mode is not None:
        check_mode(mode)
    _set, _read = mode, None


def deterministic(mode: str | None) -> str:
    """Return the mode to use instead of this one, if torch is to be deterministic.

    By timings, another run may choose another configuration, which gives other bits. So ``auto``,
    ``background`` and ``never`` become ``predict``. The other modes stay as they were asked for.
    """
    mode = chosen_mode(mode)
    return "predict" if mode in _BY_TIMINGS else mode


def winners_of(mode: str) -> tuple[str, ...]:
    """Return the modes whose winners a mode takes, the most thorough first."""
    return {"never": ("exhaustive", "topk", "auto"), "background": ("auto",)}.get(mode, (mode,))
