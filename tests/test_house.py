"""The house: imports point one way, names are fixed, importing does nothing, files stay small."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import costmodel

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "costmodel"

LAYERS = (
    "kernels", "errors",
    "support.untrusted", "support.folders", "support.remembered", "support.installed",
    "support.counters", "support.bounded", "support.locks", "support.daemons",
    "support.supervisor", "support.kept", "support.read_ahead",
    "space.config", "space.code_class", "space.workload", "space.target", "space.kernel_code",
    "space.specialize", "space.grid", "space.space", "space.space_rows",
    "compiling.ptx_flow", "compiling.ptx", "compiling.artifact", "compiling.triton_key",
    "compiling.launchers", "compiling.binaries", "compiling.compiler", "compiling.compile_pool",
    "data.measurement", "data.candidates", "data.shards", "data.destination",
    "data.artifact_table", "data.artifact_files", "data.measurement_table", "data.frame",
    "data.dataset",
    "launching.launch", "launching.recorded", "launching.repacking", "launching.torch_product",
    "runner",
    "evaluation.duplicates", "evaluation.heldout", "evaluation.metrics", "evaluation.evaluate",
    "evaluation.coverage", "evaluation.uncertainty",
    "features.estimate", "features.analytic", "features.features", "features.concepts",
    "models",
    "collection.sampling", "collection.compile_ahead", "collection.collect",
    "collection.worklist",
    "tuning.modes", "tuning.shipped", "tuning.ranking", "tuning.explanation",
    "tuning.tuning_result", "tuning.trial", "tuning.tuner", "tuning.expectation", "tuning.cuts",
    "tuning.spread",
    "winners.buckets", "winners.cache", "winners.cache_bundle", "winners.from_use",
    "winners.timing_bench", "winners.ranks", "winners.question", "winners.spreader",
    "winners.winners",
    "dispatch.torch_context", "dispatch.arguments", "dispatch.outputs", "dispatch.batches",
    "dispatch.prepared", "dispatch.loading", "dispatch.pins", "dispatch.calls",
    "dispatch.capture", "dispatch.background", "dispatch.preparing", "dispatch.dispatch",
    "dispatch.ahead", "dispatch.warming",
    "torch_ops", "nn", "costmodel",
    "reports.correlation", "reports.comparison", "reports.report", "reports.html_page",
    "reports.html_report",
    "doctor.check", "doctor.doctor_files", "doctor.doctor",
    "cli", "__main__",
)  # fmt: skip
"""Each part may import those before it, at any depth of its code, and none after it."""

TOP_LEVEL = {
    "README.md", "benchmarks", "costmodel", "datasets", "docs", "kernels", "models",
    "pyproject.toml", "tests",
}  # fmt: skip


def part_of(path: Path) -> str:
    """The layer of a source file: itself, or the whole folder where that is one layer."""
    return layer_of(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(names: Sequence[str]) -> str:
    """The layer of a module, or of what is in one, by its names under the package."""
    if not names or names[0] == "__init__":
        return "costmodel"
    return names[0] if names[0] in LAYERS else ".".join(names[:2])


def source_files() -> list[Path]:
    """Those of the package itself; rglob follows no link, such as the one to the kernels.

    The ``__init__`` of a folder whose files are layers says what it is for, and nothing else.
    """
    files = sorted(PACKAGE.rglob("*.py"))
    return [file for file in files if part_of(file) != f"{file.parent.name}.__init__"]


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
    part = layer_of(rest)
    return part if part in LAYERS else "costmodel"


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


@pytest.mark.fault("B11")
def test_importing_costmodel_is_light() -> None:
    heavy = ("torch", "triton", "xgboost", "pyarrow", "sklearn", "joblib", "matplotlib", "typer")
    code = "import json, sys, costmodel; print(json.dumps([*sys.modules]))"
    loaded = set(json.loads(run(code, ROOT)))
    assert loaded.isdisjoint(heavy)


@pytest.mark.fault("B11")
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
    from costmodel.reports.report import outdated

    assert outdated(ROOT / "README.md") == [], "run `costmodel report`"
