"""Runs the black-box tests of an earlier commit against the present package.

::

    python tests/blackbox.py [--commit 05648d9] [--list] [arguments of pytest ...]

A test is black-box if neither it nor what it uses of its file, of fixtures and of the modules
beside it touches more than the command line, the public names of the package and files. That is
read from the sources of the commit. The selected tests, and only what they need, are written to a
temporary folder; the names that the package exports are imported from its top, so that the tests
do not depend on where they are defined. It is not part of CI.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPEN_MODULES = ("nn", "errors")
COMMAND_LINE = {("costmodel.cli", "app"), ("costmodel.cli", "main")}
NAMED_IN_TEXT = re.compile(r"\b(?:from\s+)?costmodel\.(\w+)(?:\.(\w+))?")

RECORDING = "made_up_recording"
"""This helper writes a dataset with the package. The earlier package writes it, in a process of
its own: then it is a file on disk like any other."""
RECORDING_STANDIN = """
import json, os, subprocess, sys
import costmodel
THEN = {then!r}
START = "import json, sys\\nfrom pathlib import Path\\nfrom made_up_recording import *\\n"
ENVIRONMENT = {{**os.environ, "PYTHONPATH": os.pathsep.join([THEN, THEN + "/tests"])}}
def _then(code, *arguments):
    command = [sys.executable, "-c", START + code]
    return subprocess.run([*command, *arguments], cwd=THEN, env=ENVIRONMENT, check=True,
                          stdout=subprocess.PIPE, text=True).stdout
_given = json.loads(_then(
    "print(json.dumps([TARGET.to_dict(), RECORDED.to_dict(), [w.to_dict() for w in TRAINING]]))"))
TARGET = costmodel.Target.from_dict(_given[0])
RECORDED = costmodel.Workload.from_dict(_given[1])
TRAINING = [costmodel.Workload.from_dict(w) for w in _given[2]]
def write_recording(path, target=TARGET, protocol=None):
    _then("path, target, protocol = map(json.loads, sys.argv[1:])\\n"
          "write_recording(Path(path), type(TARGET).from_dict(target), protocol)",
          *map(json.dumps, (str(path), target.to_dict(), protocol)))
    return costmodel.Dataset.open(path)
"""
RECORDING_NAMES = {"TARGET", "RECORDED", "TRAINING", "write_recording"}


@dataclass
class Module:
    """A file of tests: what its statements bind and use."""

    path: Path
    lines: list[str]
    body: list[ast.stmt]
    bound: dict[str, list[int]] = field(default_factory=dict)  # name -> its statements

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text()
        module = cls(path, text.splitlines(), ast.parse(text).body)
        for index, statement in enumerate(module.body):
            for name in names_bound(statement):
                module.bound.setdefault(name, []).append(index)
        return module

    def source(self, index: int) -> str:
        statement = self.body[index]
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        return "\n".join(self.lines[first - 1 : statement.end_lineno])


def names_bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
    return [n.id for n in stored if isinstance(n.ctx, ast.Store)]


def names_used(statement: ast.stmt) -> set[str]:
    """Names that a statement reads, fixtures among them: they are parameters, or named in marks.

    Annotations are left out: the written files do not evaluate them.
    """
    annotations = [
        a for n in ast.walk(statement) for part in ("annotation", "returns")
        if (a := getattr(n, part, None)) is not None
    ]  # fmt: skip
    left_out = {id(n) for a in annotations for n in ast.walk(a)}
    used: set[str] = set()
    for node in ast.walk(statement):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.arg):
            used.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("usefixtures"):
            used |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return used


def is_fixture(statement: ast.stmt, autouse: bool = False) -> bool:
    marks = [ast.unparse(d) for d in getattr(statement, "decorator_list", [])]
    return any("fixture" in m and (not autouse or "autouse=True" in m) for m in marks)


class Selection:
    """Which names of which modules are black-box, and what each of them needs."""

    def __init__(self, tests: Path, exports: dict[str, str]) -> None:
        self.tests, self.exports = tests, exports
        self.public = {*exports, *OPEN_MODULES}
        self.modules: dict[Path, Module] = {}
        self.verdicts: dict[tuple[Path, str], str] = {}  # why it is not black-box; "" if it is

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module.read(path)
        return self.modules[path]

    def places(self, path: Path, name: str) -> list[Path]:
        """Files in which a name that is used in a file may be bound, the nearest only."""
        folders = [f for f in (path.parent, *path.parent.parents) if f.is_relative_to(self.tests)]
        for place in (path, *(folder / "conftest.py" for folder in folders)):
            if place.exists() and name in self.module(place).bound:
                statements = self.module(place).bound[name]
                if place == path or any(is_fixture(self.module(place).body[i]) for i in statements):
                    return [place]
        return []

    def why_not(self, path: Path, name: str) -> str:
        """Return the first thing that makes a name of a file no black box, or nothing."""
        key = path, name
        if key not in self.verdicts:
            self.verdicts[key] = ""  # a name that is being looked at may use itself
            self.verdicts[key] = self._look(path, name)
        return self.verdicts[key]

    def _look(self, path: Path, name: str) -> str:
        module = self.module(path)
        for index in module.bound[name]:
            statement = module.body[index]
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if why := self._import(path, statement, name):
                    return why
                continue
            if why := self._statement(statement):
                return f"{name}: {why}"
            for other in sorted(names_used(statement)):
                for place in self.places(path, other):
                    if why := self.why_not(place, other):
                        return why
        return ""

    def _import(self, path: Path, statement: ast.Import | ast.ImportFrom, name: str) -> str:
        """Judge what an import binds to a name, or to any of its names if this is empty."""
        for alias in statement.names:
            if name and (alias.asname or alias.name).split(".")[0] != name:
                continue
            if isinstance(statement, ast.Import):
                helper, what = alias.name, "*"
                whole = helper.split(".")
                if whole[0] == "costmodel" and not (set(whole[1:2]) <= self.public):
                    return f"imports {helper}"
            else:
                helper, what = statement.module or "", alias.name
                if helper.split(".")[0] == "costmodel" and not self.is_open(helper, what):
                    return f"imports {helper}.{what}"
            beside = self.tests / f"{helper}.py"
            if beside.exists() and helper == RECORDING:
                if what not in RECORDING_NAMES:
                    return f"imports {helper}.{what}"
            elif beside.exists():
                if what == "*":
                    return f"imports {helper} whole"
                if why := self.why_not(beside, what):
                    return why
        return ""

    def is_open(self, module: str, name: str) -> bool:
        """Tell if ``from module import name`` gives something public."""
        inner = module.partition(".")[2]
        if not inner:
            return name in self.public
        return (
            inner in OPEN_MODULES
            or (module, name) in COMMAND_LINE
            or self.exports.get(name) == inner
        )

    def _statement(self, statement: ast.stmt) -> str:
        """Judge what a statement does itself, by whatever name."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                if private and owner not in ("self", "cls"):
                    return f"looks at {owner}.{node.attr}"
                if owner == "costmodel" and node.attr not in (*self.public, "__version__"):
                    return f"uses costmodel.{node.attr}"
                if owner in ("monkeypatch", "patch") and node.attr in ("setattr", "setitem"):
                    return "patches"
            elif isinstance(node, ast.Name) and node.id == "__file__":
                return "looks at the repository"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                if why := self._import(Path(), node, ""):
                    return why
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for first, second in NAMED_IN_TEXT.findall(node.value):
                    if first not in self.public and (f"costmodel.{first}", second) != (
                        "costmodel.cli", "app",
                    ):  # fmt: skip
                        return f"names costmodel.{first} in a text"
        return ""

    def selected(self, path: Path) -> list[str]:
        """Return the black-box tests of a file: those that have to do with the package at all."""
        module = self.module(path)
        always = [
            name for name, at in module.bound.items()
            if name == "pytestmark" or any(is_fixture(module.body[i], autouse=True) for i in at)
        ]  # fmt: skip
        if any(self.why_not(path, name) for name in always):
            return []
        found = []
        for name, at in module.bound.items():
            is_test = isinstance(module.body[at[-1]], ast.FunctionDef | ast.ClassDef)
            if not is_test or not name.startswith(("test_", "Test")) or self.why_not(path, name):
                continue
            needs = self.needed(path, [*always, name])
            text = "\n".join(m.source(i) for p, at in needs.items() for m in [self.module(p)]
                             for i in at if p.name != "conftest.py")  # fmt: skip
            if "costmodel" in text:
                found.append(name)
        return [*always, *found] if found else []

    def needed(self, path: Path, names: list[str]) -> dict[Path, set[int]]:
        """Return the statements, by file, that these names of a file rest on."""
        needs: dict[Path, set[int]] = {}
        todo = [(path, name) for name in names]
        while todo:
            place, name = todo.pop()
            module = self.module(place)
            for index in module.bound.get(name, []):
                if index in needs.setdefault(place, set()) and not isinstance(
                    module.body[index], ast.ImportFrom
                ):
                    continue
                needs[place].add(index)
                statement = module.body[index]
                if isinstance(statement, ast.ImportFrom):
                    beside = self.tests / f"{statement.module}.py"
                    if beside.exists() and statement.module != RECORDING:
                        real = {a.asname or a.name: a.name for a in statement.names}
                        todo.append((beside, real[name]))
                elif not isinstance(statement, ast.Import):
                    todo += [(p, o) for o in names_used(statement) for p in self.places(place, o)
                             if (p, o) != (place, name)]  # fmt: skip
        return needs

    def written(self, path: Path, indices: set[int]) -> str:
        """Return a file with these statements, and of its imports what they use."""
        module = self.module(path)
        chosen = [module.body[i] for i in sorted(indices)]
        used = set().union(*(names_used(s) for s in chosen))
        parts = ["from __future__ import annotations"]
        for index, statement in enumerate(module.body):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                parts += self._imports_written(statement, path, used, index in indices)
            elif index in indices:
                parts.append(module.source(index))
        return "\n\n".join(parts) + "\n"

    def _imports_written(
        self, statement: ast.Import | ast.ImportFrom, path: Path, used: set[str], kept: bool
    ) -> list[str]:
        lines = []
        for alias in statement.names:
            name = (alias.asname or alias.name).split(".")[0]
            if (name not in used and not kept) or self.why_not(path, name):
                continue
            renamed = f" as {alias.asname}" if alias.asname else ""
            if isinstance(statement, ast.Import):
                lines.append(f"import {alias.name}{renamed}")
            elif statement.module != "__future__":
                module = statement.module or ""
                inner = module.partition(".")[2]
                if module.startswith("costmodel.") and self.exports.get(alias.name) == inner:
                    module = "costmodel"
                lines.append(f"from {module} import {alias.name}{renamed}")
        return lines


def exports_of(package: Path) -> dict[str, str]:
    """Return the public names of a package, and the module that each one is defined in."""
    body = ast.parse((package / "__init__.py").read_text()).body
    values = {
        ast.unparse(s.targets[0]): ast.literal_eval(s.value)
        for s in body
        if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) in ("__all__", "_WHERE")
    }
    return {name: values["_WHERE"].get(name, "") for name in values["__all__"]}


def write_tests(then: Path, folder: Path) -> dict[str, list[str]]:
    """Write the black-box tests of a checkout into a folder; return them by file."""
    tests = then / "tests"
    selection = Selection(tests, exports_of(then / "costmodel"))
    needs: dict[Path, set[int]] = {}
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        names = selection.selected(path)
        if names:
            found[str(path.relative_to(tests))] = [n for n in names if n[:4] in ("test", "Test")]
            for place, indices in selection.needed(path, names).items():
                needs.setdefault(place, set()).update(indices)
    for conftest in tests.rglob("conftest.py"):
        module = selection.module(conftest)
        for name, at in module.bound.items():
            if is_fixture(module.body[at[-1]], autouse=True):
                for place, indices in selection.needed(conftest, [name]).items():
                    needs.setdefault(place, set()).update(indices)
    for path, indices in needs.items():
        target = folder / path.relative_to(tests)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = selection.written(path, indices)
        if path == tests / "conftest.py":
            text += f"\nimport sys\nsys.path.append({str(folder)!r})\n"
        target.write_text(text)
    (folder / f"{RECORDING}.py").write_text(RECORDING_STANDIN.format(then=str(then)))
    (folder / "pyproject.toml").write_bytes((then / "pyproject.toml").read_bytes())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", default="05648d9", help="whose tests are run")
    parser.add_argument("--list", action="store_true", help="print the selected tests, run none")
    options, for_pytest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="blackbox-") as temporary:
        then, folder = Path(temporary, "then"), Path(temporary, "tests")
        folder.mkdir()
        parts = ("costmodel", "kernels", "models", "tests", "pyproject.toml")
        archive = subprocess.run(
            ["git", "archive", options.commit, *parts], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(then, filter="tar")
        found = write_tests(then, folder)
        if options.list:
            print("\n".join(f"{path}::{name}" for path, names in found.items() for name in names))
        count = sum(map(len, found.values()))
        print(f"{count} black-box test functions in {len(found)} files of {options.commit}",
              flush=True)  # fmt: skip
        if options.list:
            return 0
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [sys.executable, "-m", "pytest", "-c", str(folder / "pyproject.toml")]
        done = subprocess.run(
            [*command, "--rootdir", str(folder), "-p", "no:cacheprovider", *for_pytest,
             *(str(folder / name) for name in found)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
