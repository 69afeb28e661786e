"""A child process that may abort, hang or be killed without taking anything else with it.

Compiling and timing both run foreign code: a compiler that calls ``abort()``, a ``ptxas`` that
never returns, a kernel that poisons its CUDA context. A :class:`SupervisedWorker` runs such code
on one item after another in a child of its own session, and always gives one outcome per item.

The child is a fresh interpreter, not a fork: a fork of a process that uses CUDA, or that holds
a lock in another thread, may not be relied on. It does not import ``__main__``, so that a plain
script needs no ``if __name__ == "__main__"``; what it runs must be importable by name.

No process of the child's group outlives the parent, however the parent dies: the child holds the
read end of a pipe, the *lifeline*, whose write end only the parent has, and asks the kernel
(``F_SETOWN``, ``F_SETSIG``, see fcntl(2)) to send SIGKILL to the whole group when it closes.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Generic, TypeVar

from costmodel.errors import InvalidInput
from costmodel.files import CACHE_VARIABLE, cache_directory

__all__ = ["Crashed", "Done", "Failed", "Outcome", "SupervisedWorker", "TimedOut"]

T = TypeVar("T")
R = TypeVar("R")

START_LIMIT_S = 300.0
"""For a child to start and run ``setup``: importing torch from a cold network disk takes long."""
_TEXT_LIMIT = 2000


@dataclass(frozen=True, slots=True)
class Done(Generic[R]):
    """The function returned."""

    value: R


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised one of the expected exceptions."""

    type_name: str
    message: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """The child died; ``how`` names the signal or exit code and the last words on stderr."""

    how: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The child was killed at its limit."""

    limit_s: float


Outcome = Done[R] | Failed | Crashed | TimedOut


class SupervisedWorker(Generic[T, R]):
    """Runs ``function`` on items, one at a time, in a child that is replaced when it is lost.

    The child starts with the first item and stays for the next ones. What it prints to stdout
    is dropped; its stderr is kept for :class:`Crashed`. For one thread at a time, but ``close``
    may be called from any.

    Args:
        function: importable by name, or a ``functools.partial`` of such; so is ``setup``.
        limit_s: wall seconds per item; the start of the child is not counted.
        setup: called once in each fresh child, before its first item.
        expected: exceptions of ``function`` that become :class:`Failed`.
        items_per_child: a fresh child after so many items, for code that leaks; None: never.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        *,
        limit_s: float,
        setup: Callable[[], object] | None = None,
        expected: tuple[type[Exception], ...] = (),
        items_per_child: int | None = None,
    ) -> None:
        self._job = pickle.dumps((function, setup, expected))
        self._limit_s = limit_s
        self._items_per_child = items_per_child
        self._items = 0  # that the present child has had
        self._child: _Child | None = None
        self._setting_up = False
        self._closed = False
        # Of the two above: a child that `close` does not see would go on. A signal handler may
        # close what its own thread is starting.
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        """Whether there is a child, and it has not ended."""
        return self._child is not None and not self._child.is_dead()

    def start(self) -> None:
        """Start the child, if there is none, and do not wait for it: the first item will."""
        self._started()

    def _started(self) -> _Child:
        with self._lock:
            self._require_open()
            if self._child is not None and self._child.owner != os.getpid():
                self._discard()  # it is of the parent of this fork: two may not use its pipe
            if self._child is not None:
                return self._child
            child = self._child = _Child()
            self._setting_up = True
            if self._closed:  # by a signal handler, which saw no child
                self._discard()
            self._require_open()
        with contextlib.suppress(OSError):  # dead already: the first item will tell
            child.send(self._job)
        return child

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this worker is closed: make another one")

    def run(self, item: T) -> Outcome[R]:
        """The outcome of one item.

        Raises:
            Exception: whatever the function raises that is not expected, as the same type where
                that can be pickled, else RuntimeError; the child's traceback is in its notes.
            RuntimeError: the child cannot be started, or the worker is closed.
        """
        data = pickle.dumps(item)
        if self._items == self._items_per_child:
            self._discard()
        child = self._ready_child()
        try:
            child.send(data)
        except OSError:  # it died while it had nothing to do: not this item's fault
            self._discard()
            child = self._ready_child()
            child.send(data)
        self._items += 1
        try:
            kind, value = pickle.loads(child.receive(self._limit_s))
        except TimeoutError:
            self._discard()
            return TimedOut(self._limit_s)
        except EOFError:
            return Crashed(self._discard())
        except BaseException:  # an interrupt: the answer to come belongs to nobody
            self._discard()
            raise
        if kind == "raised":
            raise value
        return Failed(*value) if kind == "failed" else Done(value)

    def map(self, items: Iterable[T]) -> Iterator[Outcome[R]]:
        """One outcome per item, in order, each as soon as it is there."""
        return (self.run(item) for item in items)

    def close(self) -> None:
        """Kill the child and all of its group. The item it is on, if any, gets ``Crashed``."""
        with self._lock:
            self._closed = True
        self._discard()

    def __enter__(self) -> SupervisedWorker[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready_child(self) -> _Child:
        child = self._started()
        if self._setting_up:
            try:
                kind, value = pickle.loads(child.receive(START_LIMIT_S))
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                raise RuntimeError(
                    f"a worker process could not start: {self._discard()}"
                ) from error
            except BaseException:
                self._discard()
                raise
            if kind == "raised":
                self._discard()
                raise value
            self._setting_up = False
        return child

    def _discard(self) -> str:
        """Kill the child, if there is one, and tell how it died."""
        with self._lock:
            child, self._child, self._items = self._child, None, 0
        return (child and child.kill()) or "closed"


class _Child:
    """One fresh interpreter in its own session, and the pipes to it."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `kill` closes it
        self._connection, theirs = Pipe()
        lifeline, held = os.pipe()
        # Imports pass over entries that are no text, such as a Path, whose repr is no expression.
        path = [str(entry) for entry in sys.path if isinstance(entry, str)]
        serve = (
            f"import sys; sys.path[:] = {path!r}; from costmodel.support.supervisor import _serve; "
            f"_serve({theirs.fileno()}, {lifeline})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", serve],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            os.close(held)
            self._stderr.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.owner = os.getpid()
        # Runs once: when called, when this object is collected, or when the interpreter exits.
        self.kill = weakref.finalize(
            self, _kill_group, self._process, held, _identity(held), self._stderr, self.owner
        )

    def send(self, data: bytes) -> None:
        """Raises OSError if the child has died, or was killed by another thread."""
        try:
            self._stderr.seek(0)  # of the child too: last words are about the item at hand
            self._stderr.truncate()
        except ValueError as error:  # `kill` has closed it
            raise BrokenPipeError("the child was killed") from error
        self._connection.send_bytes(data)

    def receive(self, limit_s: float) -> bytes:
        """The next message. Raises EOFError if the child dies, TimeoutError past the limit."""
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            # A forked grandchild may hold the pipe open, so the child is also looked at.
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
        """Whether it has ended. It is not reaped yet, so that its group keeps its number."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # the program that uses us reaps all its children
            return True


def _environment() -> dict[str, str]:
    """That of this process; what is kept is kept in one folder, wherever the process has gone."""
    found = dict(os.environ)
    if found.get(CACHE_VARIABLE):
        with contextlib.suppress(InvalidInput):
            found[CACHE_VARIABLE] = str(cache_directory())
    return found


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _kill_group(
    process: subprocess.Popen[bytes],
    lifeline: int,
    its_identity: tuple[int, int],
    stderr: IO[bytes],
    owner: int,
) -> str:
    """Kill a child and its group, reap it, and tell how it died and its last words."""
    if os.getpid() != owner:  # a fork of the parent has a copy of this, but no say
        process.returncode = 0  # else Python warns of a child that is left running
        # The lifeline is to end with the parent. A program may have closed all that it had open.
        with contextlib.suppress(OSError):
            if _identity(lifeline) == its_identity:
                os.close(lifeline)
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it may be dead, but not what it left behind
    os.close(lifeline)
    code = process.wait()
    with stderr:
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _TEXT_LIMIT, 0))
        words = stderr.read(_TEXT_LIMIT).decode(errors="replace").strip()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"{how}: {words}" if words else how


def _serve(connection_fd: int, lifeline: int) -> None:
    """The child's side: set up, then answer each item with (kind, value) until the end."""
    for fd in (connection_fd, lifeline):
        os.set_inheritable(fd, False)  # a ptxas must not keep them open
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the kernel was asked
        return
    connection = Connection(connection_fd)

    try:
        function, setup, expected = pickle.loads(connection.recv_bytes())
        if setup is not None:
            setup()
        connection.send(("done", None))
    except Exception as error:
        connection.send_bytes(_reply_raised(error))
        return
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_reply(function, data, expected))


def _reply(
    function: Callable[[Any], Any], data: bytes, expected: tuple[type[Exception], ...]
) -> bytes:
    try:
        return pickle.dumps(("done", function(pickle.loads(data))))
    except expected as error:
        return pickle.dumps(("failed", (type(error).__name__, str(error)[:_TEXT_LIMIT])))
    except Exception as error:  # passed on to the caller, not hidden
        return _reply_raised(error)


def _reply_raised(error: Exception) -> bytes:
    error.add_note(f"in a worker process:\n{traceback.format_exc()[-_TEXT_LIMIT:]}")
    try:
        reply = pickle.dumps(("raised", error))
        pickle.loads(reply)  # some exceptions pickle, but cannot be made again
    except Exception:
        text = RuntimeError(f"{type(error).__name__}: {str(error)[:_TEXT_LIMIT]}")
        text.add_note(error.__notes__[-1])
        return pickle.dumps(("raised", text))
    return reply
