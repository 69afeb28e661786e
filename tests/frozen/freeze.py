"""Writes all that users see into one file, to which tests/test_frozen.py holds the package.

    python tests/frozen/freeze.py --differences    # lists what differs from it, writes nothing
    python tests/frozen/freeze.py --write          # writes frozen.json.gz again
    python tests/frozen/freeze.py --whole "WORKLOAD" h100-sxm   # one ranking in full, for a diff

Whoever writes the file again names the differences, with the reason of each, in the changelog.

It rests on public names, the command line and files on disk; what needs more is in adapter.py.
It is made in a process that sees no GPU and nothing of the user's: with an empty home, and caches
of its own. Each command runs in a fork that has imported libraries only, so that nothing is carried
from one to the next, as from one process to the next.

What is no figure of the package, or differs from run to run, is normalised: see NORMALISED.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = HERE / "frozen.json.gz"

# JSON keys whose values are dropped, wherever they stand, and replacements in all texts.
NORMALISED = {"rank_s", "compile_s", "measure_s", "total_s", "seconds", "path"}
REPLACED = (
    (re.escape(str(ROOT)), "ROOT"),
    (r"/\S*costmodel-frozen-\w+", "TEMPORARY"),
    (r"\b0x[0-9a-f]{6,}", "0x…"),  # addresses of objects
    (r"\b\d+\.\d+ s\b", "… s"),  # times of the tuner
    (r"[─━│┃╭╮╰╯┏┓└┘├┤┡┩┳┻╇┴┬┼]+", " "),  # frames of tables and of --help
)
DIGITS = 10  # of a float in JSON: further ones may differ between processors
LIBRARIES = ("click", "numpy", "rich", "torch", "triton", "typer", "xgboost-cpu")
CLEAR = 16

Section = dict[str, Any]


# --- The process ------------------------------------------------------------------------------


def freeze() -> dict[str, Section]:
    """All sections, made in a fresh process with an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="costmodel-frozen-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "freeze.py"), "--made-in", folder]
        subprocess.run(command, env=_environment(Path(folder)), cwd=folder, check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def _environment(folder: Path) -> dict[str, str]:
    kept = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "OMP_NUM_THREADS")
    own = {
        name: str(folder / name.lower())
        for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "COSTMODEL_CACHE_DIR",
                     "COSTMODEL_DATA_DIR", "TRITON_HOME", "TRITON_CACHE_DIR")
    }  # fmt: skip
    (folder / "home").mkdir()
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        **own,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "160", "TERMINAL_WIDTH": "160", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C",
    }  # fmt: skip


def _make(folder: Path) -> None:
    import pyarrow.parquet  # noqa: F401
    import rich.table  # noqa: F401
    import torch  # noqa: F401
    import triton  # noqa: F401
    import typer  # noqa: F401
    import xgboost  # noqa: F401

    found: dict[str, Any] = {"libraries": {name: version(name) for name in LIBRARIES}}
    for make in (helps, answers, refusals, errors, rankings):
        start = sum(os.times()[:4])  # of the processor, forks among it
        found[make.__name__] = make()
        print(f"{make.__name__}: {sum(os.times()[:4]) - start:.1f} s", file=sys.stderr, flush=True)
    text = json.dumps(found, indent=0, ensure_ascii=False)
    (folder / "result.json").write_text(text, encoding="utf-8")


def _in_fork(action: Callable[[], Any]) -> tuple[Any, str, str, int]:
    """Run something in an empty folder: its result, what it printed on both streams, exit code."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which wait
        child = os.fork()
    if child == 0:
        _child(action, folder)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    texts = [(folder / f".{name}").read_text(encoding="utf-8") for name in ("out", "err")]
    result = folder / ".result"
    value = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    return value, texts[0], texts[1], code


def _child(action: Callable[[], Any], folder: Path) -> None:
    code = 1
    try:
        os.chdir(folder)
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        value = action()
        Path(folder, ".result").write_text(json.dumps(value), encoding="utf-8")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- The command line -------------------------------------------------------------------------


def _command(*arguments: str) -> tuple[str, str, int]:
    """`python -m costmodel` with these arguments: stdout, stderr, exit code."""

    def run() -> None:
        Path("file").write_text("no folder\n", encoding="utf-8")
        sys.argv = ["costmodel", *(a.replace("ROOT", str(ROOT)) for a in arguments)]
        runpy.run_module("costmodel", run_name="__main__", alter_sys=True)

    _, out, err, code = _in_fork(run)
    return out, err, code


def helps() -> Section:
    """`--help` of every command that the help itself lists."""
    found: Section = {}

    def visit(*command: str) -> None:
        out, _, code = _command(*command, "--help")
        found[" ".join(("costmodel", *command))] = [f"exit code {code}", *_lines(out)]
        for name in _listed(out):
            visit(*command, name)

    visit()
    return found


def _listed(help_text: str) -> list[str]:
    """The commands in the frame of this name."""
    frame = re.search(r"^╭─ Commands ─.*?^╰", help_text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^│ ([a-z][\w-]*)", frame[0], re.MULTILINE) if frame else []


def answers() -> Section:
    """What commands print, as JSON or for people."""
    from commands import ANSWERS

    found: Section = {}
    for arguments in ANSWERS:
        out, err, code = _command(*arguments)
        shown = _plain(json.loads(out)) if "--json" in arguments and not code else _lines(out)
        told = _lines(err)
        if "-v" in arguments:
            told = [f"{len(told)} lines, {_hash(told)}", *told[:CLEAR]]
        found[" ".join(arguments)] = {"code": code, "stdout": shown, "stderr": told}
    return found


def refusals() -> Section:
    """Exit code and words of commands that are refused."""
    from commands import REFUSED

    found: Section = {}
    for arguments in REFUSED:
        out, err, code = _command(*arguments)
        found[" ".join(arguments)] = [f"exit code {code}", *_lines(err), *_lines(out)]
    return found


# --- Public names -----------------------------------------------------------------------------


def errors() -> Section:
    """Class and first line of the error that a call ends with."""

    def run() -> Section:
        import adapter
        import hostile

        warnings.simplefilter("ignore")
        return {
            _normal(name): _outcome(call)
            for name, call in hostile.calls(adapter.target("h100-sxm")).items()
        }

    found, _, err, _ = _in_fork(run)
    if found is None:
        raise RuntimeError(f"the hostile calls ended early: {err[-3000:]}")
    return found


def _outcome(call: Callable[[], Any]) -> str:
    try:
        value = call()
    except Exception as error:
        kind = type(error)
        ours = kind.__module__ == "costmodel.errors"
        line = next(iter(str(error).splitlines()), "")
        return _normal(f"{kind.__name__ if ours else f'{kind.__module__}.{kind.__name__}'}: {line}")
    return f"no error: {type(value).__name__}"


def rankings() -> Section:
    """Order, predictions and refusals of each workload on each target."""
    import adapter
    import workloads

    warnings.simplefilter("ignore")
    listed = workloads.all_workloads()
    found: dict[str, Section] = {name: {} for name in listed}
    # Of one class of code after the other: what does not depend on the sizes is at hand.
    ordered = sorted(listed, key=lambda name: ([*map(str, listed[name].values())][3:], name))
    for device in workloads.TARGETS:
        target = adapter.target(device)
        for name in ordered:
            found[name][device] = _ranking(adapter, adapter.workload(listed[name]), target)
    return found


def _ranking(adapter: Any, workload: Any, target: Any) -> Section:
    model, order, refused = _whole(adapter, workload, target)
    names = [name for name, _ in order]
    found = {
        "model": model,
        "counts": [len(order), len(refused)],
        "order": _hash(names),
        "predictions": hashlib.sha256(b"".join(x.tobytes() for _, x in order)).hexdigest()[:16],
        "refused": _hash(refused),
        "first": [f"{name}: {x:.9g}" for name, x in order[:CLEAR]],
        "first refused": refused[:CLEAR],
    }
    if target.device.name == "h100-sxm":  # a model need not look at all of them for the first few
        first = adapter.ranked(workload, target, CLEAR)[1]
        found["if only the first are asked for"] = (
            "the same" if first == order[:CLEAR] else [f"{name}: {x:.9g}" for name, x in first]
        )
    return found


def _whole(adapter: Any, workload: Any, target: Any) -> tuple[str, list[Any], list[str]]:
    """Model, order with predictions, and the refused in an order that mixes their reasons."""
    refused = sorted(
        (f"{name}: {reason}" for name, reason in adapter.refused(workload, target)),
        key=lambda line: (_mixed(line.partition(":")[0]), line),
    )
    return *adapter.ranked(workload, target), refused


@functools.cache
def _mixed(name: str) -> str:
    return _hash([name])


# --- Texts ------------------------------------------------------------------------------------


def _hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _normal(text: str) -> str:
    for pattern, other in REPLACED:
        text = re.sub(pattern, other, text)
    return " ".join(text.split())


def _lines(text: str) -> list[str]:
    lines = map(_normal, text.splitlines())
    return [line for line in lines if line and not line.startswith("... ")]  # still at work


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "…" if k in NORMALISED else _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return _normal(value) if isinstance(value, str) else value


# --- The file ---------------------------------------------------------------------------------


def read() -> dict[str, Section]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def write(found: dict[str, Section]) -> None:
    text = json.dumps(found, indent=0, ensure_ascii=False)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """A line for each place that differs; of two lists the first entry that does."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*was, *now)):
            place = f"{where} / {key}" if where else key
            if key not in now:
                yield f"{place}: is gone"
            elif key not in was:
                yield f"{place}: is new: {_short(now[key])}"
            else:
                yield from differences(was[key], now[key], place)
    elif isinstance(was, list) and isinstance(now, list):
        for i, (old, new) in enumerate(zip(was, now, strict=False)):
            if old != new:
                yield from differences(old, new, f"{where} / entry {i + 1}")
                return
        if len(was) != len(now):
            yield f"{where}: {len(was)} entries were, {len(now)} are: {_short((was or now)[-1])}"
    elif was != now:
        yield f"{where}:\n    was {_short(was)}\n    is  {_short(now)}"


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:300]


def _print_whole(name: str, device: str) -> None:
    import adapter
    import workloads

    workload = adapter.workload(workloads.all_workloads()[name])
    model, order, refused = _whole(adapter, workload, adapter.target(device))
    print(model, *(f"{name}: {x:.9g}" for name, x in order), *refused, sep="\n")


def main(*arguments: str) -> None:
    if arguments[:1] == ("--made-in",):
        _make(Path(arguments[1]))
    elif arguments[:1] == ("--whole",):
        sys.path[:0] = [str(ROOT)]
        _print_whole(*arguments[1:])
    elif arguments not in (("--differences",), ("--write",)):
        sys.exit(__doc__)
    else:
        found = freeze()
        lines = list(differences(read(), found)) if FILE.exists() else ["the file is new"]
        print(*lines[:200], f"{len(lines)} differences", sep="\n")
        if arguments == ("--write",):
            write(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
