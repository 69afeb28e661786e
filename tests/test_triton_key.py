"""Triton's own key: what Triton makes of its files, asked once for all processes."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime import cache

from costmodel.compile import triton_private
from costmodel.compile.triton_private import know_triton_key

ONE_PROCESS = """
from triton.runtime import cache
from costmodel.compile.triton_private import know_triton_key

own = cache.triton_key
know_triton_key()
know_triton_key()
print(cache.triton_key(), own.cache_info().misses)
"""


def test_the_next_process_is_told_what_triton_would_have_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    outputs = [
        subprocess.run(
            [sys.executable, "-c", ONE_PROCESS], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.rsplit(maxsplit=1)
        for _ in range(2)
    ]
    assert [misses for _, misses in outputs] == ["1", "0"]
    assert {key for key, _ in outputs} == {cache.triton_key()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often Triton is asked, in a Triton that was not asked yet."""
    times: list[str] = []

    @functools.lru_cache
    def own() -> str:
        times.append("asked")
        return "the key"

    monkeypatch.setattr(cache, "triton_key", own)
    return times


def test_what_triton_knows_already_stays(asked: list[str]) -> None:
    own = cache.triton_key
    own()
    know_triton_key()
    assert cache.triton_key is own


def test_a_triton_of_another_build_is_left_alone(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cache.triton_key
    monkeypatch.setattr(triton_private, "triton_files", lambda: ())
    know_triton_key()
    assert cache.triton_key is own
    monkeypatch.delattr(cache, "triton_key")
    know_triton_key()


def test_the_library_and_what_compiles_are_among_the_files() -> None:
    files = {path.name for path in triton_private.triton_files()}
    assert {"libtriton.so", "compiler.py", "code_generator.py", "cache.py", "core.py"} <= files
