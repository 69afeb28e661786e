"""One finding of ``costmodel doctor``, and what those who look for it share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Check", "attempt", "imported", "line"]

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


def attempt(name: str, make: Callable[[], Check]) -> Check:
    """A check of what is only something less without it; where it cannot be made, it has failed."""
    try:
        return make()
    except Exception as error:
        return Check(name, False, line(error), "see what is missing above", "optional")


def imported(name: str) -> tuple[Any, str]:
    """The module, or None and why not; a broken library counts as a missing one."""
    try:
        return importlib.import_module(name), ""
    except (ImportError, OSError) as error:
        return None, line(error)


def line(error: BaseException | Warning | str) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
