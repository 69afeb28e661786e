"""The classes of docs/faults.md, and the tests that are marked with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROW = re.compile(r"^\| ([A-Z]\d+) \|.*\| (yes|no) \|$", re.MULTILINE)


def classes() -> dict[str, bool]:
    """Return each id of docs/faults.md, and if its row says that it has tests."""
    page = (TESTS.parent / "docs" / "faults.md").read_text()
    return {name: has_tests == "yes" for name, has_tests in ROW.findall(page)}


def marks() -> Iterator[tuple[str, str]]:
    """Yield each id in a ``pytest.mark.fault(...)`` and where it stands.

    The source is read instead of collected: tests of the GPU and of the interpreter count, too.
    """
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                place = f"{path.relative_to(TESTS)}:{node.lineno}"
                yield from ((ast.literal_eval(argument), place) for argument in node.args)


def test_marks_name_classes_of_the_table() -> None:
    known = classes()
    assert len(known) >= 50
    assert [(name, place) for name, place in marks() if name not in known] == []


def test_the_table_says_which_classes_have_tests() -> None:
    marked = {name for name, _ in marks()}
    covered = {name for name, has_tests in classes().items() if has_tests}
    assert covered - marked == set(), "no test of these classes is left"
    assert marked - covered == set(), 'these have tests: write "yes" into docs/faults.md'
