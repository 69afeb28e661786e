"""What users see is what it was when frozen.json.gz was written: see tests/frozen/freeze.py."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECTIONS = ("helps", "answers", "refusals", "errors", "rankings")


def _script() -> Any:
    path = Path(__file__).parent / "frozen" / "freeze.py"
    spec = importlib.util.spec_from_file_location("freeze", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


freeze = _script()


@pytest.fixture(scope="module")
def was() -> dict[str, Any]:
    found: dict[str, Any] = freeze.read()
    return found


@pytest.fixture(scope="module")
def now(was: dict[str, Any]) -> dict[str, Any]:
    if version("triton") != was["libraries"]["triton"] and not os.environ.get("CI"):
        pytest.skip("another Triton than the file was made with, which compiles other binaries")
    found: dict[str, Any] = freeze.freeze()
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_users_see_what_they_saw(section: str, was: dict[str, Any], now: dict[str, Any]) -> None:
    libraries = ("click", "rich", "typer")
    if section in ("helps", "refusals") and any(
        was["libraries"][name] != now["libraries"][name] for name in libraries
    ):
        pytest.skip(f"another {', '.join(libraries)} than the file was made with, in other words")
    lines = list(freeze.differences(was[section], now[section], section))
    assert not lines, "\n".join([f"{len(lines)} differences", *lines[:20]])


def test_differences_name_the_place_and_the_first_line() -> None:
    was = {"tma": {"order": "ab", "first": ["x: 1", "y: 2"], "gone": 1}}
    now = {"tma": {"order": "ab", "first": ["x: 1", "y: 3"], "new": 2}}
    assert list(freeze.differences(was, now, "rankings")) == [
        'rankings / tma / first / entry 2:\n    was "y: 2"\n    is  "y: 3"',
        "rankings / tma / gone: is gone",
        "rankings / tma / new: is new: 2",
    ]
    assert list(freeze.differences(was, was)) == []
