"""XGBoost's trees as they lie in a UBJ file, looked at before XGBoost gets them.

XGBoost believes the sizes and indices in a file, and a file that was made to harm (or that was cut
and vouched for anew) ends the process, or worse. Here the file is read by the letter, and its
trees must be trees.

The format is UBJSON, draft 12, of which XGBoost writes a part: https://ubjson.org.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InvalidInput
from costmodel.support.untrusted import take

__all__ = ["check_trees", "parse_ubj"]

_DEEPEST = 16
_INTEGERS = {b"i": ">i1", b"U": ">u1", b"I": ">i2", b"l": ">i4", b"L": ">i8"}
_NUMBERS = _INTEGERS | {b"d": ">f4", b"D": ">f8"}
_CONSTANTS = {b"Z": None, b"T": True, b"F": False}
_SCORE = re.compile(r"\[?[-+]?\d*\.?\d+(E[-+]?\d+)?\]?", re.IGNORECASE)


def parse_ubj(data: bytes) -> Any:
    """The value that UBJ stands for; arrays of one type are NumPy's.

    Raises:
        InvalidInput: truncated, more after the value, a name twice in one object, nested too
            deeply, or nothing that XGBoost writes.
    """
    reader = _Reader(data)
    try:
        value = reader.value(reader.take(1), 0)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not UBJ: {error}") from None
    if reader.at != len(data):
        raise InvalidInput(f"not UBJ: {len(data) - reader.at} bytes after the end")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self.at:
            raise InvalidInput(f"not UBJ: {count} bytes expected at byte {self.at}")
        self.at += count
        return self._data[self.at - count : self.at]

    def value(self, kind: bytes, depth: int) -> Any:
        if depth > _DEEPEST:
            raise InvalidInput(f"not UBJ of XGBoost: nested more than {_DEEPEST} deep")
        if kind == b"{":
            return self._object(depth)
        if kind == b"[":
            return self._array(depth)
        if kind == b"S":
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0].item()
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        raise InvalidInput(f"not UBJ of XGBoost: {kind!r} at byte {self.at}")

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (kind := self.take(1)) != b"}":
            name = self._text(kind)
            if name in found:
                raise InvalidInput(f"not UBJ of XGBoost: {name!r:.80} stands twice in one object")
            found[name] = self.value(self.take(1), depth + 1)
        return found

    def _array(self, depth: int) -> Any:
        """XGBoost tells how many there are, and where all are numbers of one type, of which."""
        kind = b""
        if (mark := self.take(1)) == b"$":
            kind, mark = self.take(1), self.take(1)
        if mark != b"#":
            raise InvalidInput(f"not UBJ of XGBoost: an array without a size at byte {self.at}")
        count = self._size(self.take(1))
        if kind:
            return self._numbers(kind, count)
        if count > len(self._data) - self.at:
            raise InvalidInput(f"not UBJ: {count} values expected at byte {self.at}")
        return [self.value(self.take(1), depth + 1) for _ in range(count)]

    def _numbers(self, kind: bytes, count: int) -> NDArray[Any]:
        if kind not in _NUMBERS:
            raise InvalidInput(f"not UBJ of XGBoost: numbers of type {kind!r} at byte {self.at}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def _size(self, kind: bytes) -> int:
        if kind not in _INTEGERS:
            raise InvalidInput(f"not UBJ: a size of type {kind!r} at byte {self.at}")
        return int(self._numbers(kind, 1)[0])

    def _text(self, kind: bytes | None = None) -> str:
        return self.take(self._size(kind or self.take(1))).decode()


def check_trees(data: bytes) -> None:
    """That UBJ holds boosted trees of one target, over as many columns as it says.

    Raises:
        InvalidInput: it does not, with what is wrong.
    """
    learner = take(parse_ubj(data), "learner", dict)
    parameters = take(learner, "learner_model_param", dict)
    columns = _number(parameters, "num_feature")
    names = take(learner, "feature_names", list)
    _require(len(names) in (0, columns), f"num_feature: {len(names)} columns have names")
    for name, expected in (("num_class", 0), ("num_target", 1)):
        _require(_number(parameters, name) == expected, f"{name}: expected {expected}")
    score = take(parameters, "base_score", str)
    _require(_SCORE.fullmatch(score) is not None, "base_score: expected a number")
    booster = take(learner, "gradient_booster", dict)
    _require(take(booster, "name", str) == "gbtree", "expected a gbtree")
    model = take(booster, "model", dict)
    trees = take(model, "trees", list)
    sizes = take(model, "gbtree_model_param", dict)
    _require(_number(sizes, "num_trees") == len(trees), "num_trees: not as many as there are")
    _require(_number(sizes, "num_parallel_tree") == 1, "num_parallel_tree: expected 1")
    _integers(model, "tree_info", len(trees), 0)
    ends = _integers(model, "iteration_indptr", len(trees) + 1)
    _require(bool((ends == np.arange(len(ends))).all()), "iteration_indptr: expected 0, 1, 2, ...")
    cats = take(model, "cats", dict) if "cats" in model else {}  # not before XGBoost 3.1
    for name in cats:
        _array(cats, name, 0)
    for number, tree in enumerate(trees):
        try:
            _require(take(tree, "id", int) == number, "id: expected its place among the trees")
            _check_tree(tree, columns)
        except InvalidInput as error:
            raise InvalidInput(f"tree {number}: {error}") from None


def _check_tree(tree: Any, columns: int) -> None:
    sizes = take(tree, "tree_param", dict)
    nodes = _number(sizes, "num_nodes")
    for name, allowed in (
        ("num_deleted", (0,)), ("size_leaf_vector", (0, 1)), ("num_feature", (columns,)),
    ):  # fmt: skip
        _require(_number(sizes, name) in allowed, f"{name}: expected one of {allowed}")
    left, right = (_integers(tree, f"{side}_children", nodes) for side in ("left", "right"))
    _require(nodes >= 1, "no node")
    inner = np.flatnonzero(left != -1)
    _require(bool(((left == -1) == (right == -1)).all()), "a node with one child")
    children = np.concatenate([left[inner], right[inner]])
    # Each node but the root is the child of one before it: no circle, and none out of range.
    once = np.array_equal(np.sort(children), np.arange(1, nodes))
    later = bool((children > np.concatenate([inner, inner])).all())
    _require(once and later, "its nodes are no tree")
    parents = _integers(tree, "parents", nodes)
    told = np.array_equal(parents[children], np.concatenate([inner, inner]))
    _require(told, "parents: not those of the children")
    _integers(tree, "default_left", nodes, 1)
    _integers(tree, "split_type", nodes, 0)
    _integers(tree, "split_indices", nodes, columns - 1)
    for name in ("base_weights", "split_conditions", "loss_changes", "sum_hessian"):
        values = _array(tree, name, nodes)
        _require(values.dtype.kind == "f", f"{name}: expected fractions")
    weights = _array(tree, "base_weights", nodes)
    _require(bool(np.isfinite(weights).all()), "base_weights: expected finite ones")
    for name in ("categories", "categories_nodes", "categories_segments", "categories_sizes"):
        _array(tree, name, 0)


def _require(holds: bool, wrong: str) -> None:
    if not holds:
        raise InvalidInput(wrong)


def _number(data: Any, name: str) -> int:
    """XGBoost writes the numbers of its parameters as text."""
    text = take(data, name, str)
    _require(text.isascii() and text.isdecimal() and len(text) < 10, f"{name}: expected a count")
    return int(text)


def _array(data: Any, name: str, count: int) -> NDArray[Any]:
    found = data.get(name)
    if isinstance(found, list) and all(type(value) is int for value in found):
        found = np.array(found, np.int64)
    if not isinstance(found, np.ndarray) or found.shape != (count,):
        raise InvalidInput(f"{name}: expected {count} numbers")
    return found


def _integers(data: Any, name: str, count: int, most: int | None = None) -> NDArray[Any]:
    """Integers; where the most is told, from 0 to it."""
    found = _array(data, name, count)
    _require(found.dtype.kind in "iu", f"{name}: expected integers")
    found = found.astype(np.int64)
    if most is not None:
        _require(bool(((found >= 0) & (found <= most)).all()), f"{name}: expected 0 to {most}")
    return found
