"""Trees that predict without XGBoost, whose import takes up to two seconds on a busy machine."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from costmodel.arrays import Floats, Floats32, Indices

_NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
_CONSTANTS = {"T": True, "F": False, "Z": None, "N": None}


@dataclass(frozen=True)
class Forest:
    """Regression trees as arrays over all their nodes.

    Attributes:
        roots: the first node of each tree.
        column, below: a row goes left if its value in the column is below.
        left, right: the next nodes; a leaf is its own next node.
        unknown: the next node for NaN.
        leaf: the value that a leaf adds.
        base: the value that all trees start from.
    """

    roots: Indices
    column: Indices
    below: Floats32
    left: Indices
    right: Indices
    unknown: Indices
    leaf: Floats32
    base: float

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read trees that XGBoost has saved as UBJ, with squared error and scalar leaves."""
        learner = _value(raw, 0)[0]["learner"]
        trees = learner["gradient_booster"]["model"]["trees"]
        counts = [len(tree["left_children"]) for tree in trees]
        roots = np.cumsum([0, *counts])[:-1]
        first = np.repeat(roots, counts)

        def joined(name: str) -> Any:
            return np.concatenate([tree[name] for tree in trees])

        left, own = joined("left_children"), np.arange(len(first))
        right = np.where(left < 0, own, joined("right_children") + first)
        leaf = joined("split_conditions").astype(np.float32)
        is_leaf, left = left < 0, np.where(left < 0, own, left + first)
        base = str(learner["learner_model_param"]["base_score"])
        return cls(
            roots, joined("split_indices").astype(np.intp), leaf, left, right,
            np.where(joined("default_left").astype(bool), left, right),
            np.where(is_leaf, leaf, np.float32(0)), float(base.strip("[]")),
        )  # fmt: skip

    def predict(self, values: Floats32) -> Floats:
        """Return the prediction for each row of [n, f], float64 [n]."""
        rows = np.arange(len(values))[:, None]
        node = np.broadcast_to(self.roots, (len(values), len(self.roots)))
        while True:
            found = values[rows, self.column[node]]
            goes_left = found < self.below[node]
            following = np.where(goes_left, self.left[node], self.right[node])
            following = np.where(np.isnan(found), self.unknown[node], following)
            if (following == node).all():
                return self.leaf[node].sum(axis=1, dtype=np.float64) + self.base
            node = following


def _value(data: bytes, place: int) -> tuple[Any, int]:
    """Read one value of UBJSON; return it and the place after it."""
    kind, place = chr(data[place]), place + 1
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(data, dtype, 1, place)[0].item(), place + dtype.itemsize
    if kind == "S":
        size, place = _value(data, place)
        return data[place : place + size].decode(), place + size
    if kind not in "[{":
        return _CONSTANTS[kind], place
    if data[place : place + 1] == b"$":  # numbers of one kind
        dtype = np.dtype(_NUMBERS[chr(data[place + 1])])
        count, place = _value(data, place + 3)
        return np.frombuffer(data, dtype, count, place), place + count * dtype.itemsize
    count = None
    if data[place : place + 1] == b"#":
        count, place = _value(data, place + 1)
    names = []
    items: list[Any] = []
    while len(items) != count if count is not None else data[place] not in b"]}":
        if kind == "{":
            size, place = _value(data, place)
            names.append(data[place : place + size].decode())
            place += size
        item, place = _value(data, place)
        items.append(item)
    return dict(zip(names, items)) if kind == "{" else items, place + (count is None)
