"""Children that abort, hang, raise or leak, and parents that die: one outcome per item, no orphan.

The functions that run in the children are this module's own: `here` imports it under a name that
a child can import too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from costmodel import files
from costmodel.processes import Crashed, Done, SupervisedWorker, TimedOut


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("test_processes")


# --- what runs in the children -----------------------------------------------------------------


def act(item: Any) -> Any:
    match item:
        case "abort":
            print("LLVM ERROR: as if", file=sys.stderr, flush=True)
            os.abort()
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "bug":
            raise LookupError("a bug")
        case "unpicklable":
            raise Unpicklable("two", "arguments")
        case "unsendable":
            return lambda: None
        case "huge":
            return b"x" * 50_000_000
        case "pid":
            return os.getpid()
        case "print":
            print("on stdout", flush=True)
            os.system("echo from a grandchild")
    return item


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def grandchild_then(end: Callable[[], object], pid_file: Path) -> None:
    """Start a process that would outlive everything, note its id, and come to an end."""
    child = subprocess.Popen(["sleep", "1000"])
    pid_file.write_text(str(child.pid))
    end()


def sleep_long() -> None:
    time.sleep(1000)


def die_with_a_fork_that_keeps_the_pipe(pid_file: Path) -> None:
    if (pid := os.fork()) == 0:
        sleep_long()
    pid_file.write_text(str(pid))
    os._exit(5)


def set_flag() -> None:
    os.environ["FLAG_OF_SETUP"] = "set"


def read_flag(_: int) -> str | None:
    return os.environ.get("FLAG_OF_SETUP")


# --- outcomes ----------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def soon(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_child_keeps_things_where_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first", "then"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv(files.CACHE_VARIABLE, "a-relative-folder")
    monkeypatch.setattr(files, "_absolute", functools.cache(Path.absolute))
    monkeypatch.chdir(tmp_path / "first")
    files.cache_directory()
    monkeypatch.chdir(tmp_path / "then")
    with SupervisedWorker(os.getenv, limit_s=60) as worker:
        found = worker.run(files.CACHE_VARIABLE)
    assert found == Done(str(tmp_path / "first" / "a-relative-folder"))


@pytest.mark.fault("B12", "B27")
def test_every_item_gets_its_outcome_in_order(here: ModuleType) -> None:
    items = [1, "abort", 2, 3, "hang", 4, "exit", 5, "kill", 6]
    with SupervisedWorker(here.act, limit_s=1.0) as worker:
        outcomes = [worker.run(item) for item in items]
    assert [o.value for o in outcomes if isinstance(o, Done)] == [1, 2, 3, 4, 5, 6]
    assert outcomes[1] == Crashed("killed by SIGABRT: LLVM ERROR: as if")
    assert outcomes[4] == TimedOut(1.0)
    assert outcomes[6] == Crashed("exited with code 3")
    assert outcomes[8] == Crashed("killed by SIGKILL")


@pytest.mark.fault("B04")
def test_the_child_stays_until_it_is_lost(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=5.0) as worker:
        first, _, second, _, third = map(worker.run, ["pid", 1, "pid", "abort", "pid"])
    assert first == second != third
    assert first != Done(os.getpid())


@pytest.mark.fault("B41")
def test_a_leaky_child_is_replaced_after_its_share(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=5.0, items_per_child=2) as worker:
        first, second, third, _, fifth = map(worker.run, ["pid"] * 5)
    assert first == second
    assert len({str(o) for o in (first, third, fifth)}) == 3


def set_up_when_told(sign: Path) -> None:
    assert soon(sign.exists)


def test_a_child_can_be_started_ahead(here: ModuleType, tmp_path: Path) -> None:
    """``start`` does not wait, else the child would wait in vain."""
    sign = tmp_path / "sign"
    setup = functools.partial(here.set_up_when_told, sign)
    with SupervisedWorker(here.act, limit_s=100, setup=setup) as worker:
        worker.start()
        worker.start()
        sign.touch()
        first = worker.run("pid")
        assert isinstance(first, Done)
        assert worker.run("pid") == first
    with pytest.raises(RuntimeError, match="closed"):
        worker.start()


@pytest.mark.fault("B04")
def test_a_child_that_dies_idle_costs_no_item(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=5.0) as worker:
        first = worker.run("pid")
        assert isinstance(first, Done)
        os.kill(first.value, signal.SIGKILL)
        assert soon(lambda: not alive(first.value))
        second = worker.run("pid")
    assert isinstance(second, Done)
    assert second != first


def test_a_child_that_gets_no_item_ends_and_another_takes_its_place(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=60, idle_s=0.2) as worker:
        first = worker.run("pid")
        assert isinstance(first, Done)
        assert soon(lambda: not alive(first.value))
        assert not worker.running
        second = worker.run("pid")
        assert isinstance(second, Done)
        assert second != first


@pytest.mark.slow
def test_no_item_is_lost_while_the_child_ends_for_want_of_items(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=60, idle_s=0.05) as worker:
        for item in range(20):
            assert worker.run(item) == Done(item)
            time.sleep(0.045 + 0.001 * (item % 10))


def test_unexpected_exceptions_propagate_and_the_worker_goes_on(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=5.0) as worker:
        pid = worker.run("pid")
        with pytest.raises(LookupError, match="a bug") as caught:
            worker.run("bug")
        assert "in act" in caught.value.__notes__[0]
        with pytest.raises(RuntimeError, match="Unpicklable: two arguments"):
            worker.run("unpicklable")
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            worker.run("unsendable")
        assert worker.run("pid") == pid


def test_a_huge_result_arrives(here: ModuleType) -> None:
    with SupervisedWorker(here.act, limit_s=30.0) as worker:
        assert worker.run("huge") == Done(b"x" * 50_000_000)


@pytest.mark.fault("B66")
def test_the_childs_stdout_stays_off_ours(
    here: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    with SupervisedWorker(here.act, limit_s=5.0) as worker:
        assert worker.run("print") == Done("print")
    assert capfd.readouterr() == ("", "")


def test_setup_runs_in_each_fresh_child(here: ModuleType) -> None:
    with SupervisedWorker(here.read_flag, limit_s=5.0, setup=here.set_flag) as worker:
        assert worker.run(0) == Done("set")
    assert "FLAG_OF_SETUP" not in os.environ


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("setup", "error", "told"),
    [("bug", LookupError, "a bug"), ("abort", RuntimeError, "could not start: killed by SIGABRT")],
)
def test_a_child_that_cannot_start_is_an_error_of_its_first_item(
    here: ModuleType, setup: str, error: type[Exception], told: str, ahead: bool
) -> None:
    with SupervisedWorker(here.act, limit_s=5, setup=functools.partial(here.act, setup)) as worker:
        if ahead:
            worker.start()
        with pytest.raises(error, match=told):
            worker.run(0)


def test_close_from_another_thread_ends_a_run(here: ModuleType) -> None:
    worker = SupervisedWorker(here.act, limit_s=100.0)
    assert worker.run(0) == Done(0)
    timer = threading.Timer(0.3, worker.close)
    timer.start()
    start = time.monotonic()
    assert isinstance(worker.run("hang"), Crashed)
    assert time.monotonic() - start < 50
    timer.join()


FORKS = """
import os, sys
import test_processes as here
from costmodel.processes import SupervisedWorker

worker = SupervisedWorker(here.act, limit_s=60)
first = worker.run("pid")
if not (child := os.fork()):
    sys.exit()  # which runs what is to be done at the end of an interpreter
os.waitpid(child, 0)
assert worker.run("pid") == first
"""


@pytest.mark.fault("B27")
def test_the_end_of_a_forked_process_leaves_the_children_alone() -> None:
    where = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    subprocess.run(
        [sys.executable, "-c", FORKS],
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": where},
    )


@pytest.mark.fault("B27")
@pytest.mark.parametrize("call", ["run", "start"])
def test_close_while_the_child_is_being_started_leaves_none(
    here: ModuleType, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made: list[subprocess.Popen[bytes]] = []
    closers: list[threading.Thread] = []
    original = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        closers.append(threading.Thread(target=worker.close))
        closers[0].start()
        closers[0].join(0.2)
        made.append(original(*arguments, **options))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    worker = SupervisedWorker(here.act, limit_s=100.0)
    with contextlib.suppress(RuntimeError):  # or the close came when it had begun
        outcome = worker.run(0) if call == "run" else worker.start()
        assert call == "start" or isinstance(outcome, Crashed)
    for closer in closers:
        closer.join()
    assert made[0].returncode == -signal.SIGKILL
    assert not worker.running
    with pytest.raises(RuntimeError, match="closed"):
        worker.run(0)


def test_what_is_no_text_in_the_path_stops_no_child(
    here: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, b"bytes", None, str(tmp_path)])
    with SupervisedWorker(here.act, limit_s=60.0) as worker:
        assert worker.run(0) == Done(0)


# --- nothing is left behind --------------------------------------------------------------------


@pytest.mark.fault("B27")
@pytest.mark.parametrize(
    ("end", "outcome"), [("sleep_long", TimedOut(1.0)), ("abort", Crashed("killed by SIGABRT"))]
)
def test_grandchildren_die_with_the_child(
    here: ModuleType, tmp_path: Path, end: str, outcome: object
) -> None:
    pid_file = tmp_path / "pid"
    last = here.sleep_long if end == "sleep_long" else os.abort
    job = functools.partial(here.grandchild_then, last)
    with SupervisedWorker(job, limit_s=1.0) as worker:
        assert worker.run(pid_file) == outcome
        assert soon(lambda: not alive(int(pid_file.read_text())))


@pytest.mark.fault("B27")
def test_death_is_seen_though_a_fork_keeps_the_pipe_open(here: ModuleType, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with SupervisedWorker(here.die_with_a_fork_that_keeps_the_pipe, limit_s=60.0) as worker:
        assert worker.run(pid_file) == Crashed("exited with code 5")
        assert soon(lambda: not alive(int(pid_file.read_text())))


PARENT = """
import functools, os, signal, sys, threading, pathlib
# A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
import test_processes as here
from costmodel.processes import SupervisedWorker
worker = SupervisedWorker(functools.partial(here.grandchild_then, here.sleep_long), limit_s=600)
worker.run(pathlib.Path({pid_file!r}))
"""


@pytest.mark.fault("B27", "B31")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_when_the_parent_is_killed(tmp_path: Path, signum: signal.Signals) -> None:
    """Also: a plain script, without a main guard, may use a worker."""
    pid_file = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), pid_file=str(pid_file)))
    root = str(Path(__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.DEVNULL,
    )
    assert soon(lambda: pid_file.exists() and pid_file.read_text() != "")
    grandchild = int(pid_file.read_text())
    child = int(Path(f"/proc/{grandchild}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert alive(grandchild)
    assert alive(child)
    parent.send_signal(signum)
    parent.wait(timeout=60)
    assert soon(lambda: not alive(grandchild) and not alive(child))


@pytest.mark.fault("B41")
@pytest.mark.slow
def test_memory_and_files_stay_flat_over_many_failures(here: ModuleType) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    items = ["bug", *["x" * 100_000] * 9] * 15

    def work_through(items: list[str]) -> int:
        """Return how many got no answer."""
        failures = 0
        for item in items:
            try:
                failures += not isinstance(worker.run(item), Done)
            except LookupError:
                failures += 1
        return failures

    with SupervisedWorker(here.act, limit_s=5.0) as worker:
        work_through([*items, "abort", "abort"])
        files, mib = open_files(), peak_mib()
        assert work_through([*items, *items, "abort", "abort"]) == 32
        assert open_files() <= files
        assert peak_mib() - mib < 10
