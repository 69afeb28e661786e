"""One finding of ``costmodel doctor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Need = Literal["always", "gpu", "optional"]
"""Without it nothing works, nothing runs on a GPU, or only something is left out."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked for, whether it is there, what was found, and what to do.

    ``advice`` is empty if the check is ok.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    need: Need = "always"


class Missing(Exception):
    """Raised by a look: what is wrong, and advice or a need other than the usual ones."""

    def __init__(self, found: str, advice: str = "", need: Need | None = None) -> None:
        super().__init__(found)
        self.advice, self.need = advice, need


@dataclass(frozen=True, slots=True)
class Look:
    """A thing to look for: ``find`` returns what it found, or raises."""

    name: str
    need: Need
    find: Callable[[], str]
    advice: str

    def check(self) -> Check:
        """Look; any error is a check that failed."""
        try:
            return Check(self.name, True, self.find(), need=self.need)
        except Missing as missing:
            advice, need = missing.advice or self.advice, missing.need or self.need
            return Check(self.name, False, str(missing), advice, need)
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return Check(self.name, False, found, self.advice, self.need)
