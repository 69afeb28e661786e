"""The modules beside the tests can be imported by name, and the benchmark scripts by fixture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

# pytest imports the tests by their paths (importlib mode), so their folder is not on the path.
# Last on it, it hides nothing.
sys.path.append(str(HERE))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script by name, as Python does that runs it: its folder comes first."""
    monkeypatch.syspath_prepend(str(HERE.parent / "benchmarks"))
    return importlib.import_module


@pytest.fixture(autouse=True)
def no_files_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a user has compiled or tuned on this machine would change what the tests see."""
    base = tmp_path_factory.getbasetemp()
    # Not by the fixture monkeypatch: it would then be undone after the tests' own fixtures.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSTMODEL_CACHE_DIR", str(base / "no-winners"))
        yield
