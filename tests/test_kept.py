"""What takes long to start is there for the next user, and gone when nobody comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from costmodel.compile import compile_pool
from costmodel.support.kept import Kept


class Thing:
    """Counts how many were made, and notes when it is closed."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _no_thing_yet() -> None:
    Thing.made = 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_made_once_for_all_users() -> None:
    kept = Kept(Thing)
    assert Thing.made == 0
    with kept.use() as first:
        pass
    with kept.use() as second:
        assert second is first
        assert not second.closed
    kept.close()
    assert first.closed
    with kept.use() as third:
        assert third is not first
    kept.close()


@pytest.mark.fault("B27")
def test_it_is_closed_when_nobody_comes() -> None:
    kept = Kept(Thing, idle_s=0.05)
    with kept.use() as thing:
        time.sleep(0.2)
        assert not thing.closed, "it was in use all the time"
    wait_for(lambda: thing.closed)
    with kept.use() as other:
        assert not other.closed
    kept.close()


def test_a_user_who_comes_in_time_keeps_it() -> None:
    kept = Kept(Thing, idle_s=0.5)
    for _ in range(4):
        with kept.use() as thing:
            pass
        time.sleep(0.2)
        assert not thing.closed
    assert Thing.made == 1
    kept.close()


@pytest.mark.fault("B27")
def test_what_an_exception_leaves_behind_is_closed() -> None:
    kept = Kept(Thing)
    with pytest.raises(KeyError), kept.use() as thing:
        raise KeyError
    assert thing.closed
    with kept.use() as other:
        assert other is not thing
    kept.close()


def test_where_no_timer_can_start_it_is_closed_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept = Kept(Thing)
    monkeypatch.setattr(threading.Thread, "start", start)
    with kept.use() as thing:
        pass
    assert thing.closed
    with kept.use() as another:
        assert another is not thing


@pytest.mark.fault("B15")
def test_one_thread_at_a_time() -> None:
    kept, inside, most = Kept(Thing), 0, 0

    def come() -> None:
        nonlocal inside, most
        with kept.use():
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, Thing.made) == (1, 1)
    kept.close()


def test_compilers_in_use_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning ranks meanwhile: the thread that has them may be at one compile for a minute."""
    started: list[int] = []

    class Pool(Thing):
        def start(self, count: int) -> None:
            started.append(count)

    compilers = Kept(Pool)
    monkeypatch.setattr(compile_pool, "_compilers", compilers)
    compile_pool.start_compilers()
    assert len(started) == 1
    with compilers.use():
        thread = threading.Thread(target=compile_pool.start_compilers, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert len(started) == 1
    compilers.close()
