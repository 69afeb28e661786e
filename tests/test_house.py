"""The house: imports point one way, names are fixed, importing does nothing, files stay small."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import costmodel

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "costmodel"

LAYERS = (
    "kernels",
    "errors", "untrusted", "folders", "remembered", "installed", "counters", "modes", "buckets",
    "bounded", "locks",
    # the problem, the machine, a point in the space; what the compiler is told; what may run
    "config", "code_class", "workload", "target", "kernel_code", "specialize", "grid", "space",
    "space_rows",
    # compiling
    "ptx_flow", "ptx", "artifact", "measurement", "candidates", "supervisor", "kept", "read_ahead",
    "daemons", "triton_key", "launchers", "binaries", "compiler", "compile_pool",
    # data
    "shards", "destination", "artifact_table", "artifact_files", "measurement_table", "frame",
    "dataset",
    # running
    "launch", "recorded", "repacking", "torch_product", "runner",
    # judging
    "duplicates", "heldout", "metrics", "evaluate", "coverage", "uncertainty",
    # models
    "estimate", "analytic", "features", "concepts", "models", "correlation", "comparison",
    # the loop that feeds them
    "sampling", "compile_ahead", "collect", "worklist",
    # choosing
    "shipped", "ranking", "explanation", "tuning_result", "trial", "tuner", "expectation", "cuts",
    "spread",
    "cache", "cache_bundle", "from_use",
    "timing_bench", "ranks", "question", "spreader", "winners",
    # launching what was chosen
    "torch_context", "arguments", "outputs", "batches", "prepared", "loading", "pins", "calls",
    "capture",
    "background", "preparing", "dispatch", "torch_ops", "nn", "ahead", "warming",
    # people
    "costmodel", "report", "html_page", "html_report", "check", "doctor_files", "doctor", "cli",
    "__main__",
)  # fmt: skip
"""Each part may import those before it, at any depth of its code, and none after it."""

TOP_LEVEL = {
    "README.md", "benchmarks", "costmodel", "datasets", "docs", "kernels", "models",
    "pyproject.toml", "tests",
}  # fmt: skip


def part_of(path: Path) -> str:
    """The layer of a source file: its first name under the package."""
    name = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "costmodel" if name == "__init__" else name


def source_files() -> list[Path]:
    """Those of the package itself; rglob follows no link, such as the one to the kernels."""
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The absolute names that a file imports, wherever in it, and on which line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_part(name: str) -> str | None:
    """The layer that an import of this name reaches; None outside the package."""
    first, *rest = name.split(".")
    if first != "costmodel":
        return None
    return rest[0] if rest and rest[0] in LAYERS else "costmodel"


def run(code: str, cwd: Path, **environment: str) -> str:
    """What Python prints, in a process of its own that starts in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_part_has_a_place() -> None:
    present = {part_of(path) for path in source_files()}
    assert present | {"kernels"} == set(LAYERS)


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = LAYERS.index(part_of(path))
    upward = [
        f"line {line}: {name}"
        for line, name in imports(path)
        if (part := imported_part(name)) is not None and LAYERS.index(part) > own
    ]
    assert upward == []


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_triton_alone(path: Path) -> None:
    assert {name.split(".")[0] for _, name in imports(path)} <= {"triton", "__future__"}


def test_folders_that_share_a_name_with_other_packages_are_no_packages() -> None:
    found = [p for name in ("kernels", "models", "datasets") for p in ROOT.glob(f"{name}/**/*.py")]
    assert found
    assert [p for p in found if p.name == "__init__.py"] == []


def test_the_root_hides_no_installed_package(tmp_path: Path) -> None:
    names = ("kernels", "models", "datasets")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    # As when Python is started in the repository: its root comes first on the path.
    code = f"import {', '.join(names)}; print({', '.join(n + '.__file__' for n in names)})"
    found = run(code, ROOT, PYTHONPATH=str(tmp_path)).split()
    assert found == [str(tmp_path / name / "__init__.py") for name in names]


def test_top_level_names_are_fixed() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = {line.split("/")[0] for line in listing.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_importing_costmodel_is_light() -> None:
    heavy = ("torch", "triton", "xgboost", "pyarrow", "sklearn", "joblib", "matplotlib", "typer")
    code = "import json, sys, costmodel; print(json.dumps([*sys.modules]))"
    loaded = set(json.loads(run(code, ROOT)))
    assert loaded.isdisjoint(heavy)


def test_importing_any_module_touches_neither_gpu_nor_environment() -> None:
    modules = [
        ".".join(("costmodel", *p.relative_to(PACKAGE).with_suffix("").parts))
        for p in source_files()
        if p.name != "__main__.py"
    ]
    code = f"""
import importlib, json, os, sys
before = dict(os.environ)
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
import torch
print(json.dumps([dict(os.environ) == before, torch.cuda.is_initialized()]))
"""
    assert json.loads(run(code, ROOT)) == [True, False]


def test_exports_exist() -> None:
    assert [name for name in costmodel.__all__ if not hasattr(costmodel, name)] == []
    assert {"load", "matmul", "rank", "train", "tune", "use"} <= set(costmodel.__all__)


@pytest.mark.parametrize("folder", ["costmodel", "kernels", "benchmarks"])
def test_files_can_be_read_in_one_go(folder: str) -> None:
    sizes = {p: len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert {str(p): n for p, n in sizes.items() if n > 400} == {}


def test_readme_tables_are_made_of_the_results() -> None:
    from costmodel.report import outdated

    assert outdated(ROOT / "README.md") == [], "run `costmodel report`"
