"""Threads that the interpreter does not wait for, and programs whose main thread is done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import joblib
import pytest

from costmodel.support import daemons
from costmodel.support.daemons import Daemons, usable_cores

HERE = Path(__file__).parent


def test_answers_come_as_soon_as_they_are_there() -> None:
    goes_on = threading.Event()

    def wait(item: int) -> int:
        assert item or goes_on.wait(60)
        return item

    threads = Daemons(wait, [0, 1, 2], at_once=2, name="a test")
    found = []
    for answer in threads.answers():
        found.append(answer)
        if len(found) == 2:
            goes_on.set()
    threads.join()
    assert found == [1, 2, 0]


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_what_is_raised_in_a_thread_is_raised(error: type[BaseException]) -> None:
    def fail(item: int) -> int:
        raise error(item)

    threads = Daemons(fail, [7], at_once=4, name="a test")
    with pytest.raises(error, match="7"):
        list(threads.answers())
    threads.join()


def test_what_is_cancelled_is_not_begun_and_nobody_waits_for_it() -> None:
    begun: list[int] = []
    goes_on = threading.Event()

    def wait(item: int) -> int:
        begun.append(item)
        assert item == 0 or goes_on.wait(60)
        return item

    threads = Daemons(wait, range(100), at_once=1, name="a test")
    answers = threads.answers()
    assert next(answers) == 0
    threads.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        list(answers)
    goes_on.set()
    threads.join()
    assert len(begun) <= 2


def test_too_few_threads_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [1, 0]

    def may_start(thread: threading.Thread) -> None:
        if not left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    threads = Daemons(abs, [-1, -2, -3], at_once=3, name="a test")
    assert list(threads.answers()) == [1, 2, 3]
    threads.join()
    left[:] = [0]
    with pytest.raises(RuntimeError, match="can't start"):
        list(Daemons(abs, [-1], at_once=3, name="a test").answers())


# --- how many -----------------------------------------------------------------------------------


def test_the_cores_are_those_that_joblib_counts() -> None:
    assert usable_cores() == joblib.cpu_count()


@pytest.mark.fault("B48")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8), ({"cpu.max": "max 100000\n"}, 8), ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "max\n"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)  # fmt: skip
def test_a_container_may_have_less(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(daemons, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOKY_MAX_CPU_COUNT", raising=False)
    assert usable_cores() == cores


@pytest.mark.fault("B48")
def test_the_variable_of_joblib_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert usable_cores() == 1


# --- programs whose main thread is done ---------------------------------------------------------


@pytest.fixture
def ends(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """What a program says on stdout and on stderr until it ends."""

    def run(program: str, limit_s: float = 240) -> tuple[str, str]:
        path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-W", "always::RuntimeWarning", "-c", program], cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout, done.stderr

    return run


_SERVES_ON = """
import tempfile, threading
from pathlib import Path
import pytest, torch
import costmodel.tuning.tuner
from costmodel.compile.compile_pool import compile_for_device
from dispatch_fakes import MODEL, FakeLaunch, Machine

machine = Machine(pytest.MonkeyPatch(), Path(tempfile.mkdtemp()))
costmodel.tuning.tuner.compile_for_device = compile_for_device
FakeLaunch.__call__ = lambda *_: None

def ask(n):
    a, b = torch.empty(1024, n).half(), torch.empty(n, 1024).half()
    costmodel.matmul(a, b, model=MODEL, mode="auto", tf32=None)
    print(n, costmodel.stats().tuned, flush=True)

def serve():
    threading.main_thread().join()
    ask(1024)

{before}
threading.Thread(target=serve).start()
"""


@pytest.mark.compile
@pytest.mark.parametrize("before", ["", "ask(2048)"], ids=["the first", "a later one"])
def test_a_first_call_is_tuned_after_the_main_thread_has_ended(
    ends: Callable[[str], tuple[str, str]], before: str
) -> None:
    said, _ = ends(_SERVES_ON.format(before=before))
    assert said == ("2048 1\n1024 2\n" if before else "1024 1\n")


def test_jobs_in_the_background_go_on_after_the_main_thread_has_ended(
    ends: Callable[[str], tuple[str, str]],
) -> None:
    said, errors = ends("""
import threading, time
from costmodel.dispatch.background import Background

background, goes_on = Background(lambda keys: None), threading.Event()

def fail(_):
    goes_on.wait()
    raise ValueError("no such device")

background.submit("wrong", fail)
background.submit("right", lambda switch: print("done", flush=True))

def serve():
    threading.main_thread().join()
    goes_on.set()
    deadline = time.monotonic() + 60
    while not background.has_tried("right") and time.monotonic() < deadline:
        time.sleep(0.01)

threading.Thread(target=serve).start()
""")
    assert said == "done\n"
    assert errors.count("no such device") >= 1, "it is no end of the program that failed it"


@pytest.mark.fault("B27")
def test_the_interpreter_ends_while_compiles_are_queued(
    ends: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    """And begins none of them. No limit of theirs would end this in time."""
    start = time.monotonic()
    said, errors = ends(f"""
import time
from pathlib import Path
from costmodel.dispatch.background import Background
from costmodel.compile.compile_pool import CompilePool
from test_daemons import hang
from test_compiler import FAKE_TARGET, spec_of

def job(switch):
    specs = [spec_of("pointer", m, n, 128) for m in (16, 32, 64) for n in (16, 32, 64)]
    with CompilePool(2, limit_s=3600) as pool:
        list(pool.compile(specs, FAKE_TARGET, dump=Path({str(tmp_path)!r}), compile_function=hang))

background = Background(lambda keys: None)
background.submit("a job", job)
while len([*Path({str(tmp_path)!r}).glob("begun-*")]) < 2:
    time.sleep(0.01)
print("the main thread is done", flush=True)
""")
    assert (said, errors) == ("the main thread is done\n", "")
    assert len([*tmp_path.glob("begun-*")]) == 2
    assert time.monotonic() - start < 200


def hang(spec: object, target: object, dump: Path) -> None:
    """As a compile function: says that it was called, and no more."""
    (dump / f"begun-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(3600)


_ENDS_WHILE_LAUNCHERS_ARE_BUILT = """
import signal, sys, threading, time
from costmodel.compile import launchers

begun = threading.Event()

def build(text):
    begun.set()
    time.sleep(3600)

launchers._text, launchers._build = str, build
signal.signal(signal.SIGALRM, lambda *_: sys.exit())
with launchers.building_launchers(["a launcher"]):
    assert begun.wait(60)
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # while they are waited for
"""


@pytest.mark.fault("B31")
def test_a_program_that_is_interrupted_ends_while_launchers_are_built(
    ends: Callable[[str], tuple[str, str]],
) -> None:
    assert ends(_ENDS_WHILE_LAUNCHERS_ARE_BUILT) == ("", "")
