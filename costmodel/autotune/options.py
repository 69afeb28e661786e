"""The options of :func:`costmodel.autotune` that Triton's own decorator does not have."""

from dataclasses import dataclass
from math import inf

from costmodel.errors import InvalidInput
from costmodel.tuning.modes import check_mode


@dataclass(frozen=True)
class Options:
    """Options of a tuning; see :func:`costmodel.autotune`."""

    mode: str | None = None
    budget_s: float = inf
    check: str = ""
    isolate: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_mode(self.mode)
        if not self.budget_s > 0:
            raise InvalidInput(f"budget_s={self.budget_s!r}: expected seconds over 0")
        for name, known in (("check", "agree"), ("isolate", "timing"), ("model", "ptx-score")):
            if (given := getattr(self, name)) not in ("", known):
                raise InvalidInput(f"{name}={given!r}: expected {known!r} or nothing")
