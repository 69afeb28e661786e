"""Tables, plots and pages for people."""

import math
from typing import Any


def shown(value: Any) -> str:
    """Return a value as text: four digits of a float, a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
