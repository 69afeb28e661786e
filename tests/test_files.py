"""Typed JSON and files that are written as a whole."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from costmodel.errors import CorruptFile, InvalidInput
from costmodel.files import (
    decode,
    encode,
    parse_json,
    read_json,
    replace_file,
    write_json,
)


@dataclass(frozen=True, slots=True)
class Part:
    kind: Literal["a", "b"]
    count: int
    us: float = 1.0
    pairs: tuple[tuple[str, float], ...] = ()
    note: str | None = None
    by_name: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InvalidInput(f"count={self.count}: expected at least 0")


@dataclass(frozen=True, slots=True)
class Whole:
    first: Part
    others: tuple[Part, ...] = ()


WHOLE = Whole(Part("a", 1, 1e-7, (("x", 2.5),), None, {"y": 3.0}), (Part("b", 2, note="n"),))


def test_what_is_written_is_read() -> None:
    assert decode(encode(WHOLE), Whole) == decode(json.loads(encode(WHOLE)), Whole) == WHOLE
    assert decode(b'{"first": {"kind": "a", "count": 1, "surplus": 1}}', Whole).first.count == 1
    assert b"1e-07" in encode(WHOLE), "as json writes it, on which keys and hashes rest"
    assert decode('{"kind": "a", "count": 1, "us": 3}', Part).us == 3.0


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ({"kind": "x", "count": 1}, r"first\.kind: .*'x'"),
        ({"kind": "a", "count": True}, r"first\.count: expected `int`, got `bool`, found True"),
        ({"kind": "a", "count": "1"}, r"first\.count: expected `int`, got `str`, found '1'"),
        ({"kind": "a", "count": 1.0}, r"first\.count: expected `int`"),
        ({"kind": "a"}, r"first: expected an object with 'count', found {'kind': 'a'}"),
        ({"kind": "a", "count": -1}, r"first: count=-1: expected at least 0"),
        ({"kind": "a", "count": 2**63}, r"integer of 64 bits"),
        ({"kind": "a", "count": 1, "us": 10**400}, r"integer of 1329 bits"),
        ({"kind": "a", "count": 1, "us": math.nan}, r"nan is not a finite number"),
        ({"kind": "a", "count": 1, "pairs": [["x"]]}, r"first\.pairs\[0\]: "),
        ({"kind": "a", "count": 1, "by_name": {"y": "z"}}, r"first\.by_name"),
        ([], r"first: expected `object`, got `array`, found \[\]"),
        (None, r"first: expected `object`, got `null`"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named(first: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        decode({"first": first}, Whole)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, r"expected an object with 'first', found \{\}"),
        ([], r"expected `object`, got `array`, found \[\]"),
        (None, "expected `object`, got `null`, found None"),
    ],
)
def test_of_the_whole_no_field_is_named(data: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{told}$"):
        decode(data, Whole)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_not_written(number: float) -> None:
    with pytest.raises(InvalidInput, match="not a finite number"):
        encode(Part("a", 1, number))


def test_text_and_numbers_of_a_subclass_are_written_as_such() -> None:
    """As the version of torch is a text of its own class, and a NumPy float is a float."""
    written = encode({"version": type("Version", (str,), {})("2.11"), "us": np.float64(1e-7)})
    assert json.loads(written) == {"version": "2.11", "us": 1e-7}


@pytest.mark.parametrize("opened", ['{"a": ', "["])
def test_json_that_is_too_deep_is_refused(opened: str) -> None:
    closed = "}" if opened[0] == "{" else "]"
    assert parse_json(opened * 63 + "1" + closed * 63)
    for depth in (65, 100_000):
        with pytest.raises(InvalidInput, match="not JSON"):
            parse_json(opened * depth + "1" + closed * depth)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"first": {"kind": "a"}}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"file\.json: "):
        read_json(path, Whole)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, WHOLE)
    assert read_json(path, Whole) == WHOLE
    assert read_json(path) == json.loads(path.read_text())
    with path.open("wb") as file:
        file.truncate(2**30)  # takes no room
    with pytest.raises(CorruptFile, match="expected at most 67108864 bytes: take it away"):
        read_json(path, Whole)
    with pytest.raises(CorruptFile, match="expected a file"):
        read_json(tmp_path, Whole)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing.json", Whole)


@pytest.mark.fault("B31")
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="nowhere/file"):
        replace_file(tmp_path / "nowhere" / "file", b"new")
