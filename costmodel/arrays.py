"""Types of arrays, named by what they hold."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Indices = NDArray[np.intp]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Texts = NDArray[np.object_]
FloatsByName = dict[str, Floats]

ArrowTable = Any
ArrowSchema = Any
"""Table and schema of pyarrow, as Any: its import takes 0.1 s, and mypy knows no types of it."""
