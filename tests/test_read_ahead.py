"""Items that are made in a thread while others are in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from costmodel.support.read_ahead import ReadAhead


def test_all_items_come_in_order() -> None:
    with ReadAhead(range(100)) as batches:
        found = [x for batch in batches for x in batch]
    assert found == [*range(100)]


def test_it_reads_on_while_nobody_asks() -> None:
    read = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        yield 2
        read.set()

    with ReadAhead(items()) as batches:
        assert read.wait(5)
        assert next(iter(batches)) == [1, 2]


def test_the_first_item_does_not_wait_for_the_second() -> None:
    more = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert more.wait(5)
        yield 2

    with ReadAhead(items()) as batches:
        first = iter(batches)
        assert next(first) == [1]
        more.set()
        assert next(first) == [2]


def test_what_is_raised_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("a bug of ours")

    with ReadAhead(items()) as batches:
        made = iter(batches)
        assert next(made) == [1]
        with pytest.raises(KeyError, match="a bug of ours"):
            next(made)


def test_leaving_early_waits_for_nothing_and_closes_the_generator() -> None:
    go_on, closed = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        try:
            yield 1
            go_on.wait(60)
            yield 2
            raise AssertionError("read on")
        finally:
            closed.set()

    with ReadAhead(items()) as batches:
        next(iter(batches))
    assert not closed.is_set(), "it waited for the next item"
    go_on.set()
    assert closed.wait(60)


def test_the_seconds_are_those_of_the_items_not_of_their_use() -> None:
    with ReadAhead([1, 2]) as batches:
        assert [*batches]
        time.sleep(1.0)
    assert batches.seconds < 1.0
