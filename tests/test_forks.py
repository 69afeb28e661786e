"""Programs that fork, as for loaders of data: the parent's children stay the parent's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

_AROUND_A_FORK = """
import os, sys, tempfile, threading, time
from pathlib import Path

import test_compiler
from costmodel.compile.compile_pool import CompilePool
from costmodel.support.kept import Kept
from costmodel.support.supervisor import Crashed, Done, SupervisedWorker
from costmodel.tuning.timing_bench import TimingBench
from test_compiler import FAKE_TARGET, spec_of

def in_a_fork(function):
    \"\"\"What it gives there; the fork leaves as programs do.\"\"\"
    theirs, ours = os.pipe()
    if not (pid := os.fork()):
        os.write(ours, repr(function()).encode())
        sys.exit()
    os.close(ours)
    with open(theirs) as said:
        result = said.read()
    assert os.waitpid(pid, 0)[1] == 0
    return eval(result)

def compiled(pool, *depths):
    \"\"\"The depths that the pool compiled, and which of its processes did it.\"\"\"
    made = [*pool.compile(
        [spec_of("pointer", 16, 16, depth) for depth in depths], FAKE_TARGET,
        compile_function=test_compiler.faulty_compile,
    )]
    return {a.spec.config_binary[3] for a in made}, {a.registers for a in made}
"""


def run(program: str) -> None:
    """Until it ends as it should, with nothing said: not of children left running either."""
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning:subprocess", "-c",
         _AROUND_A_FORK + program],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.fault("B15")
def test_a_fork_has_compilers_of_its_own_and_leaves_those_of_its_parent() -> None:
    run("""
from costmodel.compile.compile_pool import _compilers

def ask(depth):
    with _compilers.use() as pool:
        return compiled(pool, depth)

depths, first = ask(128)
theirs = in_a_fork(lambda: ask(256))
assert theirs[0] == {256} and not theirs[1] & first, theirs
assert ask(512) == ({512}, first), "the parent's are as they were"
""")


@pytest.mark.fault("B15")
def test_a_pool_that_is_in_use_serves_the_fork_by_other_children() -> None:
    run("""
with CompilePool(1) as pool:
    depths, first = compiled(pool, 128)
    theirs = in_a_fork(lambda: compiled(pool, 256))
    assert theirs[0] == {256} and not theirs[1] & first, theirs
    assert compiled(pool, 512) == ({512}, first)
    in_a_fork(pool.close)
    assert compiled(pool, 1024) == ({1024}, first)
    folder = Path(pool._clean_up.peek()[2][0])
    assert folder.is_dir()
assert not folder.exists()
""")


@pytest.mark.fault("B15")
def test_a_fork_does_not_wait_for_who_uses_what_is_kept() -> None:
    """Nor is anything of the parent closed there, after whatever time."""
    run("""
class Thing:
    def __init__(self):
        self.owner, self.closed = os.getpid(), False
    def close(self):
        assert self.owner == os.getpid()
        self.closed = True

kept = Kept(Thing, idle_s=0.05)
begun, goes_on = threading.Event(), threading.Event()

def use():
    with kept.use():
        begun.set()
        goes_on.wait(60)

def ask():
    assert not kept.in_use
    with kept.use() as thing:
        return thing.owner == os.getpid()

threading.Thread(target=use).start()
assert begun.wait(60)
assert in_a_fork(ask)
goes_on.set()
""")


@pytest.mark.fault("B27")
def test_a_fork_does_not_hold_on_to_the_children_of_its_parent() -> None:
    """They end with their parent, by a pipe of which the fork has a copy."""
    run("""
def closes():
    worker.run(-1)
    try:
        return os.fstat(held).st_ino != pipe
    except OSError:
        return True

with SupervisedWorker(abs, limit_s=60) as worker:
    worker.start()
    held = worker._child.kill.peek()[2][1]
    pipe = os.fstat(held).st_ino
    assert in_a_fork(closes)
    assert os.fstat(held).st_ino == pipe
    assert worker.run(-3) == Done(3)
""")


@pytest.mark.fault("B15")
@pytest.mark.parametrize("ready", [False, True])
def test_a_worker_answers_each_process_by_a_child_of_its_own(ready: bool) -> None:
    run(f"""
with SupervisedWorker(abs, limit_s=60) as worker:
    worker.start()
    assert not {ready} or worker.run(-1) == Done(1)
    theirs = in_a_fork(lambda: [worker.run(-2).value, worker._child._process.pid])
    assert theirs[0] == 2
    assert theirs[1] != worker._child._process.pid
    assert worker.run(-3) == Done(3)
""")
