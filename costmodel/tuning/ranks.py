"""The ranks of a process group: one decision for all of them, or none that rests on a timing.

Two ranks that time the same candidates may choose differently. Ranks also compute in any order,
and some compute nothing, so that a product may never wait for another rank. So where there is a
process group, a product is not timed; decisions are shared where the program says that all ranks
have come: in ``costmodel.warmup(..., group=...)``. There, whatever fails on one rank is an error
on all of them, and none waits for one that has given up.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from costmodel.errors import InvalidInput, RankError

_MOST_CHARACTERS = 500

T = TypeVar("T")


def epoch() -> int:
    """Number the process group that this process is in; 0 is none.

    What was decided in one group does not hold in the next, which may have other ranks. Every
    product asks, so it takes a tenth of a microsecond.
    """
    world = _GROUPS.WORLD
    if world is None:
        return 0
    group, number = _latest
    return number if group() is world else _begun(world)


class _NoGroups:
    """Stands for the groups of a torch that was built without ``torch.distributed``."""

    WORLD = None


_GROUPS: Any = getattr(dist, "GroupMember", _NoGroups)
_lock = threading.Lock()
_numbers = itertools.count(1)
# Held weakly, for a group keeps its connections.
_latest: tuple[Callable[[], Any], int] = (lambda: None, 0)


def _begun(world: Any) -> int:
    global _latest
    with _lock:
        if _latest[0]() is not world:
            _latest = weakref.ref(world), next(_numbers)
        return _latest[1]


class Ranks:
    """The ranks of one process group. Every method is a collective: all of them call it.

    What is sent is JSON, and nothing else.

    Args:
        group: a ``torch.distributed`` process group that this process is a rank of.

    Raises:
        InvalidInput: no process group, or one that this process is not in.
    """

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInput(
                "group= without a process group: call torch.distributed.init_process_group before"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidInput(
                f"group is a {type(group).__name__}: expected a process group that this rank is "
                f"in, such as torch.distributed.group.WORLD"
            )
        self._group = group
        self._first = dist.get_rank(group) == 0

    def each(self, do: Callable[[], T]) -> T:
        """Do something on every rank; return its result once all have one.

        Raises:
            RankError: it failed on some rank, with its error; on every rank.
        """
        value, failure, cause = None, "", None
        try:
            value = do()
        except Exception as error:
            failure, cause = _told(error), error
        failures = self._gathered(failure)
        for rank, text in enumerate(failures):
            if text:
                count = sum(map(bool, failures))
                raise RankError(
                    f"{count} of {len(failures)} ranks failed, rank {rank} of the group first: "
                    f"{text}"
                ) from cause
        return value  # type: ignore[return-value]

    def require_same(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Check that all ranks have the same list of objects.

        Raises:
            RankError: with the first difference; on every rank.
        """
        first, *others = self._gathered(json.loads(json.dumps(list(told))))
        for rank, other in enumerate(others, 1):
            if difference := _difference(first, other):
                raise RankError(
                    f"rank {rank} of the group differs from rank 0 in {difference}: share winners "
                    f"in a group of equal ranks, which ask for the same products in one order"
                )

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Decide on the first rank; return its decision on all, as JSON gives it back.

        Raises:
            RankError: it failed there; on every rank.
        """
        said: list[Any] = [None]
        cause = None
        if self._first:
            try:
                said = [{"decision": json.dumps(decide())}]
            except Exception as error:
                said, cause = [{"failure": _told(error)}], error
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        if "failure" in said[0]:
            raise RankError(f"rank 0 of the group failed: {said[0]['failure']}") from cause
        return json.loads(said[0]["decision"])

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, json.dumps(value), group=self._group)
        return [json.loads(text) for text in found]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.{_MOST_CHARACTERS}}"


def _difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """The first one, in words; empty if there is none."""
    if len(ours) != len(theirs):
        return f"the number of products, {len(theirs)} and {len(ours)}"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in one | other:
            if one.get(name) != other.get(name):
                return (
                    f"{name} of product {number}: {other.get(name)!r:.100} and "
                    f"{one.get(name)!r:.100}"
                )
    return ""
