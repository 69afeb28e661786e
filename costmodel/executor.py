"""Threads whose work the interpreter does not wait for at its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")


class DaemonExecutor(Executor):
    """A ``ThreadPoolExecutor`` whose work the interpreter does not wait for at its end.

    Its threads wait for child processes, which are killed then.

    Args:
        max_workers: threads at most; each starts with an item.
        name: of the threads.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers, self._name = max_workers, name
        self._todo: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this executor is shut down: make another one")
            if len(self._threads) < self._max_workers:
                self._start_thread()
            self._todo.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
            if cancel_futures:
                with contextlib.suppress(Empty):
                    while (item := self._todo.get_nowait()) is not None:
                        if item[0].cancel():
                            item[0].set_running_or_notify_cancel()  # tells who waits for it
            for _ in self._threads:
                self._todo.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=_work, args=(self._todo,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process may have no more threads
            if not self._threads:
                raise
            return
        self._threads.append(thread)


def _work(todo: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := todo.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # whoever waits would wait for ever
                future.set_exception(error)
            else:
                future.set_result(result)
            result = None
        del item, future, call  # nothing is kept alive while the thread waits
