"""The house: imports point one way, names are fixed, importing does nothing, files stay small."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import costmodel

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "costmodel"

FOLDERS = (
    "kernels", "errors", "validation", "arrays", "files", "processes",
    "hardware", "compile", "gemm", "data", "launch", "measure", "evaluation", "features",
    "models", "collect", "tuning", "autotune", "dispatch", "scaled", "torch_ops", "nn", "costmodel",
    "reports", "cli", "__main__",
)  # fmt: skip
"""Each folder, or file that lies beside the folders, imports only those before it."""

TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "benchmarks", "costmodel",
    "datasets", "docs", "kernels", "models", "pyproject.toml", "tests",
}  # fmt: skip


def folder_of(path: Path) -> str:
    """The entry of FOLDERS that a source file belongs to."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "costmodel" if first == "__init__" else first


def source_files() -> list[Path]:
    """Files of the package itself; rglob follows no link, such as the one to the kernels."""
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The absolute names that a file imports, wherever in it, and on which line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    names = ("costmodel", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names).removesuffix(".__init__")


def imported_folder(name: str) -> str | None:
    """The entry of FOLDERS that an imported name belongs to; None outside the package."""
    first, *rest = name.split(".")
    if first != "costmodel":
        return None
    return rest[0] if rest and rest[0] in FOLDERS else "costmodel"


def find_circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def run(code: str, cwd: Path, **environment: str) -> str:
    """What Python prints, in a process of its own that starts in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_has_a_place() -> None:
    assert {folder_of(path) for path in source_files()} | {"kernels"} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_imports_point_one_way(folder: str) -> None:
    own = FOLDERS.index(folder)
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in source_files()
        if folder_of(path) == folder
        for line, name in imports(path)
        if (other := imported_folder(name)) is not None and FOLDERS.index(other) > own
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path) for path in source_files()}
    graph: dict[str, set[str]] = {}
    for path in source_files():
        own = module_of(path)
        names = {name for _, name in imports(path)}
        found = {m for name in names for m in (name, name.rpartition(".")[0]) if m in modules}
        # A folder's __init__ gives out what its files define.
        graph[own] = {m for m in found if m != own and not own.startswith(f"{m}.")}
    assert find_circle(graph) == []


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) != []


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


@pytest.mark.fault("B11")
def test_importing_costmodel_is_light() -> None:
    heavy = ("torch", "triton", "xgboost", "pyarrow", "sklearn", "joblib", "matplotlib", "typer")
    code = "import json, sys, costmodel; print(json.dumps([*sys.modules]))"
    loaded = set(json.loads(run(code, ROOT)))
    assert loaded.isdisjoint(heavy)


@pytest.mark.fault("B11")
def test_ranking_and_timing_import_no_torch_before_they_need_it() -> None:
    names = ("cli", "measure.device", "measure.replay", "tuning.ranking", "tuning.tuner")
    imports = ", ".join(f"costmodel.{name}" for name in names)
    assert run(f"import sys, {imports}; print('torch' in sys.modules)", ROOT) == "False\n"


@pytest.mark.fault("B11")
def test_importing_any_module_touches_neither_gpu_nor_environment() -> None:
    modules = [module_of(p) for p in source_files() if p.name != "__main__.py"]
    code = f"""
import importlib, json, os, sys
before = dict(os.environ)
for name in {modules!r}:
    importlib.import_module(name)
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


def test_functions_are_short() -> None:
    """Of the package; a Triton kernel is one function, whatever it takes."""
    long = [
        f"{path}:{node.name}"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []


def test_every_folder_of_the_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in source_files()}
    expected = {".".join(folder.parts) for folder in folders}
    assert {name for name in listed if not name.endswith(".kernels")} == expected - {
        "costmodel.kernels", "costmodel.gemm.kernels"
    }  # fmt: skip


def test_the_page_for_an_index_needs_no_repository() -> None:
    """No address is known of pictures and other pages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / project["readme"]).read_text()
    assert "](" not in page
    assert "<img" not in page
    assert f"pip install {project['name']}\n" in page
    assert project["version"] == costmodel.__version__
    assert "urls" not in project


def test_readme_tables_are_made_of_the_results(script: Callable[..., Any]) -> None:
    found = script("tables").outdated(ROOT / "README.md")
    assert found == [], "run `python benchmarks/tables.py`"
