"""Runs the suites ``interpreted_*.py`` where Triton interprets: once, in a process of its own.

``TRITON_INTERPRET`` has to be set before Triton is imported, and would spoil every test that
compiles. Here is one test for each test function there, of all its cases.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITES = [Path(__file__).with_name(f"interpreted_{x}.py") for x in ("kernels", "scaled")]
# The first test runs them all: two minutes on a slow machine, and more on a busy one.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
FUNCTIONS = [
    name for suite in SUITES for name in re.findall(r"^def (test_\w+)", suite.read_text(), re.M)
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What did not pass, by function and case; the functions that ran are keys."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [sys.executable, "-m", "pytest", *map(str, SUITES), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--tb=short", f"--junitxml={report}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout  # 2 and more: pytest itself could not go on
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        of_function = found[name.partition("[")[0]]
        for trouble in case:
            if trouble.tag in ("failure", "error", "skipped"):
                of_function[name] = trouble.text or trouble.attrib.get("message", trouble.tag)
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_interpreted(function: str, failures: dict[str, dict[str, str]]) -> None:
    assert function in failures, "did not run"
    text = "\n\n".join(f"{case}\n{trouble}" for case, trouble in failures[function].items())
    assert not text, text
