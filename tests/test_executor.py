"""Threads that the interpreter does not wait for: each piece of work has a future."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import as_completed
from pathlib import Path

import pytest
from test_compiler import gone

from costmodel.executor import DaemonExecutor

HERE = Path(__file__).parent


def test_work_is_done_as_soon_as_it_can_be() -> None:
    goes_on = threading.Event()

    def wait(item: int) -> int:
        assert item or goes_on.wait(60)
        return item

    threads = DaemonExecutor(2, "a test")
    found = []
    for future in as_completed([threads.submit(wait, item) for item in range(3)]):
        found.append(future.result())
        if len(found) == 2:
            goes_on.set()
    threads.shutdown()
    assert found == [1, 2, 0]


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_what_is_raised_in_a_thread_is_raised(error: type[BaseException]) -> None:
    def fail(item: int) -> int:
        raise error(item)

    threads = DaemonExecutor(4, "a test")
    future = threads.submit(fail, 7)
    with pytest.raises(error, match="7"):
        future.result(60)
    assert threads.submit(abs, -1).result(60) == 1, "the thread goes on"
    threads.shutdown()


def test_what_is_cancelled_is_not_begun_and_nobody_waits_for_it() -> None:
    begun: list[int] = []
    goes_on = threading.Event()

    def wait(item: int) -> int:
        begun.append(item)
        assert item == 0 or goes_on.wait(60)
        return item

    threads = DaemonExecutor(1, "a test")
    futures = [threads.submit(wait, item) for item in range(100)]
    assert futures[0].result(60) == 0
    threads.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in as_completed(futures[2:]))
    goes_on.set()
    threads.shutdown()
    assert len(begun) <= 2
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(abs, -1)


def test_too_few_threads_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [1, 0, 0]

    def may_start(thread: threading.Thread) -> None:
        if not left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    threads = DaemonExecutor(3, "a test")
    futures = [threads.submit(abs, -item) for item in range(3)]
    assert [future.result(60) for future in futures] == [0, 1, 2]
    threads.shutdown()
    left[:] = [0]
    with pytest.raises(RuntimeError, match="can't start"):
        DaemonExecutor(3, "a test").submit(abs, -1)


def program_says(program: str, folder: Path, limit_s: float = 240) -> tuple[str, str]:
    """Return what a program says on stdout and stderr until it ends."""
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "always::RuntimeWarning", "-c", program], cwd=folder,
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.mark.fault("B27")
@pytest.mark.parametrize("where", ["main", "daemon"])
def test_the_interpreter_ends_while_compiles_are_queued(tmp_path: Path, where: str) -> None:
    """And begins none of them. No limit of theirs would end this in time."""
    start = time.monotonic()
    said, errors = program_says(
        f"""
import threading, time
from pathlib import Path
from costmodel.compile.compile_pool import CompilePool
from test_executor import hang
from test_compiler import spec_of, submitted

def compile_all():
    specs = [spec_of("pointer", m, n, 128) for m in (16, 32, 64) for n in (16, 32, 64)]
    pool = CompilePool(2, limit_s=3600)
    futures = [
        submitted(pool, spec, hang, Path({str(tmp_path)!r})) for spec in specs
    ]
    if {where!r} == "daemon":
        futures[0].result()

if {where!r} == "daemon":
    threading.Thread(target=compile_all, daemon=True).start()
else:
    compile_all()
while len([*Path({str(tmp_path)!r}).glob("begun-*")]) < 2:
    time.sleep(0.01)
print("the main thread is done", flush=True)
""",
        tmp_path,
    )
    assert (said, errors) == ("the main thread is done\n", "")
    begun = [*tmp_path.glob("begun-*")]
    assert len(begun) == 2
    assert all(gone(int(path.name.split("-")[1])) for path in begun)
    assert time.monotonic() - start < 200


def hang(spec: object, target: object, dump: Path) -> None:
    """As a compile function: says that it was called, and no more."""
    (dump / f"begun-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(3600)


@pytest.mark.fault("B31")
def test_a_program_that_is_interrupted_ends_while_launchers_are_built(tmp_path: Path) -> None:
    program = """
import signal, sys, threading, time
from costmodel.compile import triton_private

begun = threading.Event()

def build(text):
    begun.set()
    time.sleep(3600)

triton_private._text, triton_private._build = str, build
signal.signal(signal.SIGALRM, lambda *_: sys.exit())
built = triton_private.build_launchers(["a launcher"])
assert begun.wait(60)
signal.setitimer(signal.ITIMER_REAL, 0.2)  # while they are waited for
built.result()
"""
    assert program_says(program, tmp_path) == ("", "")
