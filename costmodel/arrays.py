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
"""Those of pyarrow, which takes 0.1 s to import, and has no types that mypy knows."""
