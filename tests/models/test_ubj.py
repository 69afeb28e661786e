"""XGBoost's files by another hand: refused before XGBoost gets them, for it would crash."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xgboost
from numpy.typing import NDArray

import costmodel
from costmodel.errors import CorruptFile, InvalidInput
from costmodel.models import shipped_models
from costmodel.models.storage import CARD
from costmodel.models.ubj import check_trees, parse_ubj
from costmodel.models.xgb import content_hash

GOLDEN = Path(__file__).parents[1] / "golden"


def trees(columns: int = 3, rounds: int = 2, **parameters: object) -> bytes:
    """Trees that XGBoost has grown and written."""
    generator = np.random.default_rng(1)
    rows = generator.random((40, columns), np.float32)
    names = [f"column{i}" for i in range(columns)]
    data = xgboost.DMatrix(rows, label=rows.sum(1), feature_names=names, nthread=1)
    options = {"max_depth": 3, "nthread": 1, **parameters}
    return bytes(xgboost.train(options, data, rounds).save_raw("ubj"))


@pytest.fixture(scope="module")
def sound() -> bytes:
    return trees()


def field(name: str, kind: str) -> bytes:
    """How an array of numbers of this name begins."""
    return struct.pack(">Q", len(name)) + name.encode() + b"[$" + kind.encode() + b"#L"


def numbers(data: bytes, name: str, kind: str, change: Callable[[list[int]], list[int]]) -> bytes:
    """The data with other numbers in the array of this name in the first tree."""
    start = data.index(field(name, kind)) + len(field(name, kind)) + 8
    (count,) = struct.unpack(">Q", data[start - 8 : start])
    form = f">{count}{'i' if kind == 'l' else 'B'}"
    end = start + struct.calcsize(form)
    changed = change(list(struct.unpack(form, data[start:end])))
    return data[:start] + struct.pack(form, *changed) + data[end:]


def first(value: int) -> Callable[[list[int]], list[int]]:
    return lambda found: [value, *found[1:]]


def last(value: int) -> Callable[[list[int]], list[int]]:
    return lambda found: [*found[:-1], value]


HARM: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "half of it": lambda data: data[: len(data) // 2],
    "more after it": lambda data: data + b"{}",
    "a child far away": lambda data: numbers(data, "left_children", "l", first(10**9)),
    "a child before all": lambda data: numbers(data, "right_children", "l", first(-2)),
    "a circle": lambda data: numbers(data, "left_children", "l", first(0)),
    "two parents": lambda data: numbers(data, "left_children", "l", first(2)),
    "one child": lambda data: numbers(data, "left_children", "l", first(-1)),
    "a parent far away": lambda data: numbers(data, "parents", "l", last(10**9)),
    "a column far away": lambda data: numbers(data, "split_indices", "l", first(10**9)),
    "a column that is not": lambda data: numbers(data, "split_indices", "l", first(3)),
    "a tree in the place of another": lambda data: data.replace(b"idi\0", b"idi\x01", 1),
    "a category": lambda data: numbers(data, "split_type", "U", first(1)),
    "more trees than there are": lambda data: data.replace(
        b"num_treesSL" + struct.pack(">Q", 1) + b"2", b"num_treesSL" + struct.pack(">Q", 1) + b"9"
    ),
    "more nodes than there are": lambda data: data.replace(
        b"num_nodesSL" + struct.pack(">Q", 2) + b"15", b"num_nodesSL" + struct.pack(">Q", 2) + b"99"
    ),
    "an array without an end": lambda data: data.replace(
        field("parents", "l"), field("parents", "l") + b"\x7f", 1
    ),
    "an array of minus one": lambda data: data.replace(
        field("parents", "l") + b"\0" * 7, field("parents", "l") + b"\xff" * 7, 1
    ),
    "another booster": lambda data: data.replace(b"gbtree", b"dartee", 1).replace(
        b"gbtree", b"dartee"
    ),
    "very deep": lambda data: b"[#L" + struct.pack(">Q", 1) + data,
    "deep without end": lambda data: (b"[#L" + struct.pack(">Q", 1)) * 10_000,
    "billions of constants": lambda data: b"[#L" + struct.pack(">Q", 2**40) + b"Z",
    "a type that takes no space": lambda data: b"[$Z#L" + struct.pack(">Q", 2**40),
    "no UTF-8": lambda data: data.replace(b"learner", b"lea\xffner", 1),
    "a pickle": lambda data: b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.",
    "JSON": lambda data: b'{"learner": {}}',
}


def test_what_xgboost_writes_is_sound(sound: bytes) -> None:
    check_trees(sound)
    check_trees(trees(columns=1, rounds=1, max_depth=1))
    check_trees(trees(grow_policy="lossguide", max_leaves=7, tree_method="hist"))
    booster = xgboost.Booster()
    booster.load_model(bytearray(sound))
    ours, theirs = parse_ubj(sound), json.loads(booster.save_raw("json"))
    tree = ours["learner"]["gradient_booster"]["model"]["trees"][1]
    other = theirs["learner"]["gradient_booster"]["model"]["trees"][1]
    assert tree.keys() == other.keys()
    for name in ("left_children", "parents", "split_indices"):
        assert tree[name].tolist() == other[name]
    assert ours["learner"]["feature_names"] == theirs["learner"]["feature_names"]


@pytest.mark.fault("B54")
@pytest.mark.parametrize("file", sorted(GOLDEN.glob("trees-*.ubj")), ids=lambda f: f.stem)
def test_trees_of_other_releases_are_read_and_answer_alike(file: Path) -> None:
    """Written by XGBoost 2.1 to 3.2; `tests/golden/trees.py` writes those of another."""
    data = file.read_bytes()
    check_trees(data)
    booster = xgboost.Booster()
    booster.load_model(bytearray(data))
    expected = json.loads(file.with_suffix(".json").read_text())
    assert booster.inplace_predict(golden_rows()[:5]).tolist() == pytest.approx(expected, rel=1e-6)


def golden_rows() -> NDArray[np.float32]:
    """What the golden trees were grown on."""
    return (np.arange(120, dtype=np.float32).reshape(40, 3) * 7919 % 101) / 101


def test_what_is_shipped_is_sound() -> None:
    files = [file for folder in shipped_models().values() for file in folder.glob("*.ubj")]
    assert files
    for file in files:
        check_trees(file.read_bytes())


@pytest.mark.fault("B53")
@pytest.mark.parametrize("harm", HARM)
def test_what_is_no_trees_is_refused(sound: bytes, harm: str) -> None:
    spoilt = HARM[harm](sound)
    assert spoilt != sound
    with pytest.raises(InvalidInput):
        check_trees(spoilt)


LOAD = """
import sys, struct
import numpy as np, xgboost
data = open(sys.argv[1], "rb").read()
while data:
    (size,) = struct.unpack(">Q", data[:8])
    one, data = data[8 : 8 + size], data[8 + size :]
    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(one))
        booster.inplace_predict(np.ones((2, 3), np.float32))
    except (xgboost.core.XGBoostError, ValueError):
        pass
"""


@pytest.mark.fault("B53")
def test_what_passes_with_one_byte_changed_crashes_nothing(tmp_path: Path) -> None:
    sound = trees(max_depth=1)
    passed = []
    for at in range(len(sound)):
        for value in (sound[at] ^ 1, 0xFF):
            changed = sound[:at] + bytes([value]) + sound[at + 1 :]
            try:
                check_trees(changed)
            except InvalidInput:
                continue
            passed.append(struct.pack(">Q", len(changed)) + changed)
    assert 100 < len(passed) < len(sound) * 2
    (tmp_path / "trees").write_bytes(b"".join(passed))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "trees")], capture_output=True, text=True,
        check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.fault("B53")
@pytest.mark.parametrize("harm", ["a child far away", "a circle", "half of it"])
def test_a_card_that_vouches_for_harm_does_not_help(tmp_path: Path, harm: str) -> None:
    (folder, *_) = shipped_models().values()
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    spoilt = HARM[harm]((folder / "model.ubj").read_bytes())
    (tmp_path / "model.ubj").write_bytes(spoilt)
    card = json.loads((tmp_path / CARD).read_text())
    raw = {True: spoilt, False: (folder / "config.ubj").read_bytes()}
    (tmp_path / CARD).write_text(json.dumps(card | {"hash": content_hash(raw)}))
    with pytest.raises(CorruptFile, match=r"model\.ubj: not an XGBoost model"):
        costmodel.load(tmp_path)
    spoilt = HARM[harm]((folder / "torch.ubj").read_bytes())
    for name in ("model.ubj", CARD):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "torch.ubj").write_bytes(spoilt)
    hash_ = hashlib.sha256(spoilt).hexdigest()[:16]
    (tmp_path / CARD).write_text(json.dumps(card | {"torch_hash": hash_}))
    with pytest.raises(CorruptFile, match=r"torch\.ubj: not an XGBoost model"):
        costmodel.load(tmp_path)
