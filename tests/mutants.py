"""Seeded mutants: the share of small faults, put into the package one by one, that tests catch.

First ``pip install --target /tmp/site coverage``, then ``python tests/mutants.py --out r.json``.
The repository's commit is cloned and never changed in place. Each test file runs once under
coverage, to learn which tests run each line; then a mutant meets only the tests that run it.
Results are written one by one; called again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Role: the modules that are mutated, and the test files that cover them. The roles keep their
# names when files move.
ROLES = {
    role: (modules, tests)
    for role, modules, tests in (
        line.split(": ")
        for line in """
space: gemm/* hardware/*: test_space test_specialize test_config test_workload test_target \
test_names test_split_sum test_hostile_values test_compiler_settings
ranking: tuning/ranking tuning/shipped tuning/explanation features/* models/baselines: \
test_ranking test_explanation test_shipped models/test_features \
models/test_fit_estimate models/test_models models/test_confidence
tuner: tuning/tuner tuning/search tuning/tuning_result tuning/planning \
tuning/modes: test_tuner test_bucket_plans test_replay test_modes test_quiet test_cache
winners: tuning/memory tuning/tuning_key \
tuning/ranks tuning/from_use tuning/cache tuning/winners: \
test_cache test_cache_commands test_cache_faults test_from_use \
test_winner_faults test_bucket_calls test_bucket_warmup test_ranks test_dynamic_m test_threads \
test_modes_in_group
dispatch: dispatch/*: test_dispatch test_layers test_plan test_fast_launch test_odd_operands \
test_devices test_reentry test_outputs test_autocast test_torch_ops test_modes test_dynamic_m \
test_hostile_arguments test_inductor
dataset: data/*: test_dataset test_dataset_files test_dataset_refusals test_replay \
test_written_is_read test_known_artifacts test_hostile_files test_training_rows test_collect
storage: models/storage models/registry models/trees: \
models/test_registry test_model_swap models/test_canary models/test_siblings \
models/test_torch_time models/test_models test_doctor_files
""".strip().splitlines()
    )
}
CAP = 40  # tests of the first round; a mutant that survives them meets the rest as well

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub"
SWAPS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
TALK = re.compile(r"(?:^|\.)_?(?:warn\w*|print\w*|echo|debug|info)$")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
SHOWN = ("role", "file", "line", "operator", "before", "after")
VERDICTS = ("caught", "timeout", "survived", "uncovered")


def swapped(node: Any, field: str) -> str:
    """Return the source of the node with its operator, or its first one, swapped."""
    old, other = getattr(node, field), copy.copy(node)
    ops = old if isinstance(old, list) else [old]
    ops = [getattr(ast, SWAPS[type(ops[0]).__name__])(), *ops[1:]]
    setattr(other, field, ops if isinstance(old, list) else ops[0])
    return f"({ast.unparse(other)})"


def constants(node: Any) -> list[str]:
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Constant) or not isinstance(value, int | float):
        return []
    return [str(not value)] if isinstance(value, bool) else [f"({value + i!r})" for i in (1, -1)]


def mutations(node: Any, function: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield operator, the part of the node that is replaced, and what replaces it."""
    match node:
        case ast.Compare():
            yield "comparison", node, swapped(node, "ops")
        case ast.BoolOp():
            yield "and/or", node, swapped(node, "op")
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node, f"({ast.unparse(node.operand)})"
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            texts = [isinstance(getattr(side, "value", 0), str) for side in (left, right)]
            if not any(texts) and not isinstance(left, ast.JoinedStr):
                yield "plus/minus", node, swapped(node, "op")
        case ast.Constant():
            yield from (("constant", node, text) for text in constants(node))
        case ast.Return(value=ast.expr() as value):
            bools = function.returns is not None and ast.unparse(function.returns) == "bool"
            texts = ["True", "False", f"(not ({ast.unparse(value)}))"] if bools else ["None"]
            yield from (("return", value, text) for text in texts if text != ast.unparse(value))
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() if function:
            yield "statement removed", node, "pass"
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield "min/max", node.func, "max" if name == "min" else "min"
        case ast.If() | ast.IfExp():
            yield from (("condition", node.test, text) for text in ("True", "False"))
        case ast.While():
            yield "condition", node.test, "False"  # True would mostly wait for the time limit
        case ast.arguments():
            for value in [*node.defaults, *node.kw_defaults]:
                yield from (("default", value, text) for text in constants(value))


def points(node: Any, lines: Any = None, function: Any = None) -> Iterator[tuple[Any, ...]]:
    """Yield the mutations below a node, each with the lines that run it (None: the import)."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.pattern():
            return
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.keyword(arg="strict"):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=called) | ast.Expr(value=ast.Call(func=called)):
            if TALK.search(ast.unparse(called)):
                return
    if isinstance(node, ast.FunctionDef):
        function, lines = node, range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    elif isinstance(node, ast.ClassDef):
        function = lines = None
    elif isinstance(node, ast.stmt) and function:
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
        lines = range(node.lineno, last + 1)
    yield from ((*mutation, lines) for mutation in mutations(node, function))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from points(child, lines, function)


def mutated(source: str, node: Any, text: str) -> str:
    rows = source.encode().splitlines(keepends=True)
    start = sum(map(len, rows[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, rows[: node.end_lineno - 1])) + node.end_col_offset
    return (source.encode()[:start] + text.encode() + source.encode()[end:]).decode()


def chosen(root: Path, role: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw an operator, then one of its points, until the role has enough mutants."""
    rng, pools = random.Random(f"{seed} {role}"), dict[str, list[tuple[Any, ...]]]()
    for glob in ROLES[role][0].split():
        paths = sorted((root / "costmodel").glob(f"{glob}.py"))
        if not paths:
            raise SystemExit(f"the commit has no costmodel/{glob}.py: bring ROLES up to date")
        for path in paths:
            for kind, *point in points(ast.parse(path.read_text())):
                pools.setdefault(kind, []).append((str(path.relative_to(root)), *point))
    picked: dict[tuple[str, int], dict[str, Any]] = {}
    while len(picked) < count and any(pools.values()):
        kind = rng.choice(sorted(kind for kind in pools if pools[kind]))
        file, node, text, lines = pools[kind].pop(rng.randrange(len(pools[kind])))
        source = (root / file).read_text()
        shown = (role, file, node.lineno, kind, ast.get_source_segment(source, node), text)
        new = {"source": mutated(source, node, text), "lines": lines}
        picked.setdefault((file, node.lineno), dict(zip(SHOWN, shown, strict=True)) | new)
    return list(picked.values())


class Bench:
    """Runs tests on a clone, and knows which of them run a line."""

    def __init__(self, repo: Path, commit: str, site: Path) -> None:
        self.work = Path(f"/tmp/mutants-{commit[:9]}")
        self.root, self.site = self.work / "clone", site
        shutil.rmtree(self.root, ignore_errors=True)
        for folder in ("tools", "maps", "home"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-qns", repo, self.root], check=True)
        subprocess.run(["git", "-C", self.root, "checkout", "-q", commit], check=True)
        (self.root / ".venv").symlink_to((repo / ".venv").resolve())
        shutil.copy(__file__, self.work / "tools/mutants_plugin.py")
        start = "import coverage\ncoverage.process_startup()\n"
        (self.work / "tools/sitecustomize.py").write_text(start)
        (self.work / "tools/rc").write_text(
            f"[run]\nsource = {self.root}/costmodel\nparallel = true\n"
            f"data_file = {self.work}/cov/data\ncontext = ${{MUTANT_TEST-}}\n"
            "disable_warnings = no-data-collected\n"
        )

    def python(self, limit: float, *words: str, **more: str) -> tuple[int | None, str]:
        """Run Python in the clone; return None when it had to be stopped at the limit."""
        env = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # or that of the mutant before might be taken
        env |= {"HOME": f"{self.work}/home", "TRITON_CACHE_DIR": f"{self.work}/triton"} | more
        env["PATH"] = f"{self.root}/.venv/bin:{env['PATH']}"
        command, code = [f"{self.root}/.venv/bin/python", "-m", *words], None
        with open(self.work / "log", "w+") as log:
            child = subprocess.Popen(
                command, cwd=self.root, env=env, stdout=log, stderr=log, start_new_session=True
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(limit)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return code, (self.work / "log").read_text(errors="replace")

    def pytest(self, limit: float, *words: str, **more: str) -> tuple[int | None, str]:
        words = ("-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=16", *words)
        return self.python(limit, "pytest", f"--basetemp={self.work}/tmp", *words, **more)

    @functools.cache  # noqa: B019 (there is one)
    def map_of(self, name: str) -> dict[str, Any]:
        """Return the seconds of each test of a file, and the tests of each line of the package."""
        kept, cov = self.work / f"maps/{name.replace('/', '.')}.json", self.work / "cov"
        if kept.exists():
            return json.loads(kept.read_text())
        shutil.rmtree(cov, ignore_errors=True)
        cov.mkdir()
        rc = f"{self.work}/tools/rc"
        if not (self.root / f"tests/{name}.py").exists():
            raise SystemExit(f"the commit has no tests/{name}.py: bring ROLES up to date")
        self.pytest(
            3000, f"tests/{name}.py", "-p", "mutants_plugin", "-o", "timeout=1500",
            PYTHONPATH=f"{self.root}:{self.work}/tools:{self.site}", COVERAGE_PROCESS_START=rc,
            MUTANT_REPORT=f"{cov}/report.json",
        )  # fmt: skip
        tests = json.loads((cov / "report.json").read_text())
        seconds = {
            test: took
            for test, (outcome, took) in tests.items()
            # What fails may fail only because it is traced.
            if outcome == "passed" or (outcome == "failed" and self.pytest(900, test)[0] == 0)
        }
        broken = [test for test in tests if tests[test][0] == "failed" and test not in seconds]
        for words in (["combine", "-q"], ["json", "--show-contexts", "-qo", f"{cov}/all.json"]):
            paths = {"PYTHONPATH": str(self.site), "COVERAGE_RCFILE": rc}
            self.python(900, "coverage", *words, **paths)
        lines = {
            file: {line: [test for test in run if test in seconds] for line, run in one.items()}
            for file, found in json.loads((cov / "all.json").read_text())["files"].items()
            if (one := found["contexts"])
        }
        kept.write_text(json.dumps({"seconds": seconds, "lines": lines}))
        print(f"mapped {name}: {len(seconds)} tests; fail without a mutant: {broken}", flush=True)
        return json.loads(kept.read_text())

    def tests_for(self, mutant: dict[str, Any]) -> tuple[list[str], list[str], dict[str, float]]:
        """Return at most CAP tests that run the mutant, spread over the files, and the rest."""
        queues: list[list[str]] = []
        seconds: dict[str, float] = {}
        for name in ROLES[mutant["role"]][1].split():
            known = self.map_of(name)
            lines = known["lines"].get(mutant["file"], {})
            wanted = lines if mutant["lines"] is None else map(str, mutant["lines"])
            tests = {test for line in wanted for test in lines.get(line, [])}
            seconds |= {test: known["seconds"][test] for test in tests}
            queues.append(sorted(tests, key=lambda test: (seconds[test], test)))
        rows = itertools.zip_longest(*queues)
        spread = [test for row in rows for test in row if test]
        # By file, so that fixtures of a file are made once; files with cheap tests come first.
        least = {queue[0].split("::")[0]: seconds[queue[0]] for queue in queues if queue}
        first, rest = (
            sorted(part, key=lambda test: (least[test.split("::")[0]], seconds[test]))
            for part in (spread[:CAP], spread[CAP:])
        )
        return first, rest, seconds

    def verdict(self, mutant: dict[str, Any], tests: list[str], limit: float) -> tuple[str, str]:
        """Return the verdict of these tests, and the test that gave it."""
        path = self.root / mutant["file"]
        original = path.read_text()
        while tests:
            path.write_text(mutant["source"])
            code, text = self.pytest(limit, "-x", *tests)
            path.write_text(original)
            if code == 0:
                break
            failed = [test for test in FAILED.findall(text) if test in tests][:1]
            # The same without the mutant: only tests that pass then have caught it.
            began = time.monotonic()
            passes = self.pytest(10 * limit, "-x", *(failed or tests))[0] == 0
            slow = 5 * (time.monotonic() - began)
            if code is None and slow > limit:
                limit = 1.2 * slow  # the machine is slow: once more
            elif code is None:
                return "timeout", f"over {limit:.0f} s"
            elif passes:
                return "caught", (failed or [f"exit {code}: {text.strip()[-200:]}"])[0]
            else:
                print("fails without the mutant:", failed or tests, flush=True)
                tests = [test for test in tests if failed and test not in failed]
        return "survived", ""

    def judge(self, mutant: dict[str, Any]) -> dict[str, Any]:
        first, rest, seconds = self.tests_for(mutant)
        began, verdict, test = time.monotonic(), "uncovered", ""
        for tests in (first, rest):
            if tests and verdict in ("uncovered", "survived"):
                limit = max(240.0, 5 * (15 + sum(seconds[one] for one in tests)))
                verdict, test = self.verdict(mutant, tests, limit)
        took = {"tests": len(seconds), "seconds": round(time.monotonic() - began)}
        return {name: mutant[name] for name in SHOWN} | {"verdict": verdict, "test": test} | took


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'role':10}{'mutants':>11}", *(f"{verdict:>11}" for verdict in VERDICTS), "    share")
    for role in [*ROLES, "all"]:
        all_of = [one["verdict"] for one in results if role in (one["role"], "all")]
        counts = [all_of.count(verdict) for verdict in VERDICTS]
        share = (counts[0] + counts[1]) / max(1, len(all_of))
        print(
            f"{role:10}{len(all_of):11}", *(f"{n:11}" for n in counts), f"{share:9.1%}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--coverage", type=Path, default=Path("/tmp/site"), help="its folder")
    asked = parser.parse_args()
    git = ["git", "-C", asked.repo, "rev-parse", asked.commit]
    head = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    record: dict[str, Any] = {"commit": head, "seed": asked.seed, "count": asked.count}
    known = json.loads(asked.out.read_text()) if asked.out.exists() else record | {"mutants": []}
    if known | record != known:
        raise SystemExit(f"{asked.out} is of another commit, seed or count: take another --out")
    os.nice(15)
    resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, 12 << 30))
    bench = Bench(asked.repo.resolve(), head, asked.coverage)
    share, more = divmod(asked.count, len(ROLES))
    counts = [share + (i < more) for i in range(len(ROLES))]
    drawn = [chosen(bench.root, role, n, asked.seed) for role, n in zip(ROLES, counts, strict=True)]
    done = [{name: one[name] for name in SHOWN} for one in known["mutants"]]
    # The roles take turns, so that the results so far are a fair sample.
    for mutant in filter(None, itertools.chain(*itertools.zip_longest(*drawn))):
        compile(mutant["source"], mutant["file"], "exec")
        if {name: mutant[name] for name in SHOWN} not in done:
            known["mutants"].append(bench.judge(mutant))
            asked.out.with_suffix(".part").write_text(json.dumps(known, indent=1))
            asked.out.with_suffix(".part").replace(asked.out)
            print(len(known["mutants"]), *known["mutants"][-1].values())
            print_table(known["mutants"])


# The rest is for pytest: this file is its plugin while the lines are mapped.
REPORTS: dict[str, tuple[str, float]] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    import coverage

    os.environ["MUTANT_TEST"] = nodeid  # children of the test take it as their context
    coverage.Coverage.current().switch_context(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    outcome, seconds = REPORTS.get(report.nodeid, ("passed", 0.0))
    outcome = outcome if report.outcome == "passed" else report.outcome
    REPORTS[report.nodeid] = outcome, seconds + report.duration


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTANT_REPORT"]).write_text(json.dumps(REPORTS))


if __name__ == "__main__":
    main()
