"""A child process that may abort, hang or be killed without taking anything else with it.

Compiling and timing both run foreign code: a compiler that calls ``abort()``, a ``ptxas`` that
never returns, a kernel that poisons its CUDA context. A :class:`SupervisedWorker` runs such code
on one item after another in a child process, and always gives one outcome per item.

The child is a fresh interpreter, not a fork: a fork may not use CUDA. The child does not import
``__main__``, so a plain script needs no ``if __name__ == "__main__"``; what it runs must be
importable by name.

No process of the child's group outlives the parent, however the parent dies. The child holds the
read end of a pipe, the *lifeline*; only the parent has the write end. The child asks the kernel
(``F_SETOWN``, ``F_SETSIG``, see fcntl(2)) to send SIGKILL to the whole group when the pipe closes.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Generic, Self, TypeVar

from costmodel.errors import InvalidInput
from costmodel.files import CACHE_VARIABLE, cache_directory

Settings = Mapping[str, str | None]  # variables of the environment; None: unset
Action = Callable[[], object]

T = TypeVar("T")
R = TypeVar("R")

IDLE_S = 15.0
"""Seconds that a child waits for its next item before it ends, since it holds memory."""
START_LIMIT_S = 300.0
"""Seconds for a child to start and run ``setup``: torch on a cold network disk imports slowly."""
_TEXT_LIMIT = 2000
_IDLE_CODE = 117  # exit code of a child that had nothing to do


@dataclass(frozen=True)
class Done(Generic[R]):
    """The function returned."""

    value: R


@dataclass(frozen=True)
class Crashed:
    """The child died; ``how`` names the signal or exit code and the last words on stderr."""

    how: str


@dataclass(frozen=True)
class TimedOut:
    """The child was killed at its limit."""

    limit_s: float


Outcome = Done[R] | Crashed | TimedOut


class Closable:
    """Something that the end of a ``with`` closes."""

    close: Action

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SupervisedWorker(Closable, Generic[T, R]):
    """Runs ``function`` on items, one at a time, in a child that is replaced when it is lost.

    The child starts with the first item and stays for the next ones. What it prints to stdout
    is dropped; its stderr is kept for :class:`Crashed`. One thread at a time runs an item, but
    any thread may call ``close``.

    Args:
        function: importable by name, or a ``functools.partial`` of such; so is ``setup``.
        limit_s: wall seconds per item; the start of the child is not counted.
        setup: called once in each fresh child, before its first item.
        items_per_child: a fresh child after so many items, for code that leaks; None: never.
        idle_s: the child ends when it gets no item for so many seconds; None: it stays.
        settings: returns variables that a child's environment has besides those of this process;
            None removes a variable. If they change, a fresh child takes the place of the old one.
    """

    def __init__(
        self, function: Callable[[T], R], *, limit_s: float, setup: Action | None = None,
        items_per_child: int | None = None, idle_s: float | None = None,
        settings: Callable[[], Settings] = dict,
    ):  # fmt: skip
        self._settings = settings
        self._job = pickle.dumps((function, setup, idle_s))
        self._limit_s = limit_s
        self._items_per_child = items_per_child
        self._child: _Child | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards these two: a child that `close` missed would go on
        self._one_at_a_time = threading.Lock()
        close_at_exit(self)

    @property
    def running(self) -> bool:
        """Return True if there is a child that has not ended."""
        child = self._child
        return child is not None and not child.is_dead()

    def start(self) -> None:
        """Start the child, if there is none, and do not wait for it: the first item will."""
        self._running_child()

    def run(self, item: T) -> Outcome[R]:
        """Run the function on one item; other threads wait.

        Raises:
            Exception: whatever the function raises, as the same type where that can be pickled,
                else RuntimeError; the child's traceback is in its notes.
            RuntimeError: the child cannot be started, or the worker is closed.
        """
        data = pickle.dumps(item)
        with self._one_at_a_time:
            child = self._child
            if child is not None and child.items == self._items_per_child:
                self._discard()
            for _ in range(2):  # a child that got no items may end just now
                if (outcome := self._ask(data)) is not None:
                    return outcome
        raise RuntimeError("a worker process could not start: it ended before it had the item")

    def _ask(self, data: bytes) -> Outcome[R] | None:
        """Return the outcome of an item; None if the child ended before it got the item."""
        child = self._running_child()
        if not child.is_set_up:
            self._await_setup(child)
        try:
            child.send(data)
        except OSError:
            self._discard()
            return None
        child.items += 1
        reply = self._receive(child, self._limit_s)
        if isinstance(reply, Crashed) and child.process.returncode == _IDLE_CODE:
            return None
        if isinstance(reply, Crashed | TimedOut):
            return reply
        was_raised, value = reply
        if not was_raised:
            return Done(value)
        try:
            raise value
        finally:
            del value, reply  # the exception holds this frame, and the frame holds the child

    def _running_child(self) -> _Child:
        """Return the child; start one if there is none. It may not be set up yet."""
        settings = self._settings()
        with self._lock:
            if self._closed:
                raise RuntimeError("this worker is closed: make another one")
            old = self._child
            if old is not None and not old.is_dead() and old.settings == settings:
                return old
            child = self._child = _Child(settings)
        if old is not None:
            old.kill()  # kills what it left behind too
        with suppress(OSError):  # dead already: the wait for its setup will tell
            child.send(self._job)
        return child

    def _await_setup(self, child: _Child) -> None:
        match self._receive(child, START_LIMIT_S):
            case Crashed(how):
                raise RuntimeError(f"a worker process could not start: {how}")
            case TimedOut(limit_s):
                raise RuntimeError(f"a worker process could not start within {limit_s:g} s")
            case True, error:
                self._discard()
                raise error
        child.is_set_up = True

    def _receive(self, child: _Child, limit_s: float) -> tuple[bool, Any] | Crashed | TimedOut:
        """Return the child's reply (was it raised, value); without one, kill the child."""
        try:
            return pickle.loads(child.receive(limit_s))
        except EOFError:
            return Crashed(self._discard())
        except TimeoutError:
            self._discard()
            return TimedOut(limit_s)
        except BaseException:  # an interrupt: nobody would read the answer to come
            self._discard()
            raise

    def _discard(self) -> str:
        """Kill the child, if there is one, and tell how it died."""
        with self._lock:
            child, self._child = self._child, None
        return (child and child.kill()) or "closed"

    def close(self) -> None:
        """Kill the child and all of its group. An item that it works on gets ``Crashed``."""
        with self._lock:
            self._closed = True
        self._discard()


class _Child:
    """One fresh interpreter in its own session, and the pipes to it.

    Attributes:
        settings: the worker's, when the child started.
        items: number of items that it got.
        is_set_up: True once it has reported that it is ready.
    """

    def __init__(self, settings: Settings):
        self.settings, self.items, self.is_set_up = settings, 0, False
        self._stderr = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `kill` closes it
        self._connection, theirs = Pipe()
        lifeline, held = os.pipe()
        # Imports pass over entries that are no text, such as a Path, whose repr is no expression.
        path = [str(entry) for entry in sys.path if isinstance(entry, str)]
        serve = (
            f"import sys; sys.path[:] = {path!r}; from costmodel.processes import _serve; "
            f"_serve({theirs.fileno()}, {lifeline})"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", serve],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
                env=_environment(settings),
            )
        except BaseException:
            os.close(held)
            self._stderr.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        # For a child that is garbage-collected; at the interpreter's end its worker is closed.
        self._collected = weakref.finalize(self, _kill_group, self.process, held, self._stderr)
        self._collected.atexit = False

    def kill(self) -> str:
        """Kill it and its group, and tell how it died; empty if that was done before."""
        found = self._collected.detach()  # so that the finalizer does nothing later
        return _kill_group(*found[2]) if found else ""

    def send(self, data: bytes) -> None:
        """Send a message; OSError if the child has died, or was killed by another thread."""
        try:
            self._stderr.seek(0)  # the child's position too: last words are about this item
            self._stderr.truncate()
        except ValueError as error:  # `kill` has closed it
            raise BrokenPipeError("the child was killed") from error
        self._connection.send_bytes(data)

    def receive(self, limit_s: float) -> bytes:
        """Wait for the next message.

        Raises:
            EOFError: the child died. TimeoutError: past the limit.
        """
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            # A forked grandchild may hold the pipe open, so the child itself is checked too.
            dead = self.is_dead()
            if self._connection.poll(0 if dead else min(max(left_s, 0), 0.2)):
                try:
                    return self._connection.recv_bytes()
                except OSError as error:  # died in the middle of a message
                    raise EOFError from error
            if dead:
                raise EOFError
            if left_s <= 0:
                raise TimeoutError

    def is_dead(self) -> bool:
        """Return True if it has ended. It is not reaped, so that its group keeps its number."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.process.pid, flags) is not None
        except ChildProcessError:  # the program that uses us reaps all its children
            return True


def _environment(settings: Settings) -> dict[str, str]:
    """Return a child's environment; the cache folder in it is an absolute path."""
    given = {**os.environ, **settings}
    found = {name: value for name, value in given.items() if value is not None}
    if found.get(CACHE_VARIABLE):
        with suppress(InvalidInput):
            found[CACHE_VARIABLE] = str(cache_directory())
    return found


def _kill_group(process: subprocess.Popen[bytes], lifeline: int, stderr: IO[bytes]) -> str:
    """Kill a child and its group, reap it, and tell how it died and its last words."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it may be dead, but not what it left behind
    os.close(lifeline)
    code = process.wait()
    with stderr:
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _TEXT_LIMIT, 0))
        words = stderr.read(_TEXT_LIMIT).decode(errors="replace").strip()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"{how}: {words}" if words else how


# --- The child's side -----------------------------------------------------------------------------


def _serve(connection_fd: int, lifeline: int) -> None:
    """Set up, then answer each item with (was it raised, value) until the end."""
    for fd in (connection_fd, lifeline):
        os.set_inheritable(fd, False)  # a ptxas must not keep them open
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the kernel was asked
        return
    connection = Connection(connection_fd)
    try:
        function, setup, idle_s = pickle.loads(connection.recv_bytes())
        if setup is not None:
            setup()
        connection.send_bytes(pickle.dumps((False, None)))
    except Exception as error:
        connection.send_bytes(_reply_raised(error))
        return
    while True:
        if not connection.poll(idle_s):
            os._exit(_IDLE_CODE)
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            reply = pickle.dumps((False, function(pickle.loads(data))))
        except Exception as error:  # passed on to the caller, not hidden
            reply = _reply_raised(error)
        connection.send_bytes(reply)


def _reply_raised(error: Exception) -> bytes:
    error.add_note(f"in a worker process:\n{traceback.format_exc()[-_TEXT_LIMIT:]}")
    try:
        reply = pickle.dumps((True, error))
        pickle.loads(reply)  # some exceptions can be pickled, but not unpickled
    except Exception:
        text = RuntimeError(f"{type(error).__name__}: {str(error)[:_TEXT_LIMIT]}")
        text.add_note(error.__notes__[-1])
        return pickle.dumps((True, text))
    return reply


# --- The end of the interpreter ------------------------------------------------------------------


def close_at_exit(thing: Any) -> None:
    """Call ``thing.close()`` at the interpreter's end, if the object still exists."""
    _open.add(thing)


_open: weakref.WeakSet[Any] = weakref.WeakSet()


# A forked process must not close what belongs to its parent.
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    for thing in list(_open):
        thing.close()
