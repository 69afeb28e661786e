"""Whatever stands in JSON of ours: an error of ours, or a value that can be used."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_examples import CONFIGS, RESULT, TARGET, A

from costmodel.data.dataset import Dataset
from costmodel.errors import CostModelError, InvalidInput
from costmodel.files import parse_json
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import shipped_models
from costmodel.models.storage import read_card
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.validation import one_line

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 10**400, float("nan"), float("inf"), -1.5, "", "x" * 10, "../../etc", "\ud800",
    "__import__('os').abort()", [], {}, [[]], {"a": 1}, 2**63, 10**9,
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in nested JSON: all of them."""
    yield path
    if isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, name))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(data)
    place = result
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return result


READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "result": (RESULT.to_dict(), TuningResult.from_dict),
    "config": (CONFIGS[0].to_dict(), GemmConfig.from_dict),
    "workload": (A.to_dict(), Workload.from_dict),
    "target": (TARGET.to_dict(), Target.from_dict),
}


@pytest.mark.fault("B13", "B53")
@pytest.mark.parametrize("kind", READERS)
def test_any_value_in_any_place_is_refused_or_can_be_used(kind: str) -> None:
    data, read = READERS[kind]
    for place in places(data):
        for value in HOSTILE:
            try:
                found = read(changed(data, place, value))
            except CostModelError:
                continue
            assert len(str(found)) < 100_000, (place, value)
            json.dumps(found.to_dict(), allow_nan=False)
            hash(found.workload if kind == "result" else found)
            if kind == "result":
                assert found.costs.total_s >= 0 or place[0] == "costs"
                assert all(m.latency_us > 0 for _, m in found.measured if m.ok)


def cards() -> dict[str, tuple[Any, Callable[[Path], Any]]]:
    """By file: what a sound card says, and who reads it."""
    (shipped, *_) = shipped_models().values()
    model = json.loads((shipped / "card.json").read_text())
    dataset = {"protocol": {"repeats": 5}, "schema": 2, "target": TARGET.to_dict()}
    return {"model": (model, read_card), "dataset": (dataset, Dataset.open)}


@pytest.mark.fault("B53")
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_any_value_in_any_place_of_a_card_is_refused_or_can_be_used(
    tmp_path: Path, kind: str
) -> None:
    card, read = cards()[kind]
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    read(tmp_path)
    for place in places(card):
        if len(place) > 1 and place[0] in ("features", "config_features") and place[1] > 2:
            continue  # a few stand for two hundred
        for value in HOSTILE:
            path.write_text(json.dumps(changed(card, place, value)))
            try:
                found = read(tmp_path)
            except CostModelError:
                continue
            assert found.target


@pytest.mark.parametrize("value", [None, 5, "x", [], b"x"])
def test_what_is_no_object_is_refused(value: Any) -> None:
    for read in (read for _, read in READERS.values()):
        with pytest.raises(InvalidInput):
            read(value)


def test_numbers_that_json_lacks_are_null_in_a_result_and_kept_on_disk(tmp_path: Path) -> None:
    odd = dataclasses.replace(RESULT, ranked=((CONFIGS[0], float("inf")),))
    cache = WinnerCache(tmp_path)
    cache.put({"name": "odd"}, odd)
    found = cache.get({"name": "odd"})
    assert found is not None
    assert found.ranked == ((CONFIGS[0], None),)


# --- json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "[" * 200_000, "[" * 70 + "]" * 70,
     '{"a":' * 70 + "1" + "}" * 70, '{"a":' * 100_000, '{"a": NaN}', "[-Infinity]", "1e999",
     "1" * 5000, "\x80", "{'a': 1}", "[1,]"],
)  # fmt: skip
def test_json_is_read_by_the_letter(text: str) -> None:
    with pytest.raises(InvalidInput, match="not JSON"):
        parse_json(text)
    with pytest.raises(InvalidInput, match="not JSON"):
        parse_json(text.encode("latin-1"))


@pytest.mark.fault("B53")
@pytest.mark.parametrize("depth", [1, 10, 64])
def test_json_may_be_as_deep_as_ours_and_more(depth: int) -> None:
    found = parse_json("[" * depth + "]" * depth)
    assert json.dumps(found) == "[" * depth + "]" * depth
    assert parse_json(json.dumps({"a": [{"b": found}] if depth < 60 else 1}))


@pytest.mark.fault("B53", "B66")
@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nb\t c", "a b c"), ("\x1b[31mred", "\\x1b[31mred"), ("é–ü", "é–ü"),
     ("\u202egpj", "\\u202egpj"), ("x" * 300, "x" * 199 + "…"), (ValueError("a\n"), "a")],
)  # fmt: skip
def test_what_is_told_is_one_line(text: object, line: str) -> None:
    assert one_line(text) == line
