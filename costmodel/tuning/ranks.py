"""The ranks of a process group: one decision for all of them, or none that rests on a timing.

Two ranks that time the same candidates may choose differently. Ranks also compute in any order,
and some compute nothing, so that a product must never wait for another rank. So where there is a
process group, a product is not timed. Decisions are shared where the program says that all ranks
take part: in ``costmodel.warmup(..., group=...)``. There, a failure on one rank is an error on all
of them, and no rank waits for one that has given up.
"""

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist

from costmodel.errors import InvalidInput, RankError
from costmodel.files import Named, digest

_MOST_CHARACTERS = 500

T = TypeVar("T")


def epoch() -> int:
    """Return the number of the process group that this process is in; 0 is none.

    What was decided in one group does not hold in the next, which may have other ranks. Every
    product calls this, so it takes a tenth of a microsecond.
    """
    world = WORLD._default_pg
    if world is None:
        return 0
    group, number = _latest
    return number if group() is world else _begun(world)


# Its field is read without a call. A torch that was built without ``torch.distributed`` has none.
WORLD: Any = getattr(
    getattr(dist, "distributed_c10d", None), "_world", SimpleNamespace(_default_pg=None)
)
_lock = threading.Lock()
_numbers = itertools.count(1)
# Held weakly, since a group keeps its connections.
_latest: tuple[Callable[[], Any], int] = (lambda: None, 0)


def _begun(world: Any) -> int:
    global _latest
    with _lock:
        if _latest[0]() is not world:
            _latest = weakref.ref(world), next(_numbers)
        return _latest[1]


def first_said(key: object, text: str) -> str:
    """Return the text of the first rank of the process group that has called this with the key."""
    if not epoch():
        return text
    name = f"costmodel/{digest(json.dumps(key), 64)}"
    said = dist.distributed_c10d._get_default_store().compare_set(name, "", text)
    return said.decode()


class Ranks:
    """The ranks of one process group. Every method is a collective: all of them call it.

    What is sent is text: errors, and decisions as JSON.

    Args:
        group: a ``torch.distributed`` process group that this process is a rank of.

    Raises:
        InvalidInput: no process group, or one that this process is not in.
    """

    def __init__(self, group: Any):
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
            RankError: on every rank, if ``do`` failed on one; the message has its error.
        """
        failure, cause = "", None
        try:
            value = do()
        except Exception as error:
            failure, cause = f"{type(error).__name__}: {error!s:.{_MOST_CHARACTERS}}", error
        failures = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, failure, group=self._group)
        for rank, text in enumerate(failures):
            if text:
                count = sum(map(bool, failures))
                raise RankError(
                    f"{count} of {len(failures)} ranks failed, rank {rank} of the group first: "
                    f"{text}"
                ) from cause
        return value

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Decide on the first rank; return its decision on all, as JSON gives it back.

        Raises:
            RankError: on every rank, if ``decide`` failed.
        """
        said = [self.each(lambda: json.dumps(decide()) if self._first else "")]
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        return json.loads(said[0])

    def require_same(self, told: Sequence[Named]) -> None:
        """Check that all ranks have the same list of objects.

        Raises:
            RankError: on every rank, if they differ; the message has the first difference.
        """
        first = self.decided(lambda: told)
        self.each(lambda: _require_same(first, json.loads(json.dumps(told))))


def _require_same(first: list[Named], here: list[Named]) -> None:
    """Refuse, by RankError, other objects than those of the first rank."""
    found: list[tuple[str, Any, Any]] = [("the number of products", len(here), len(first))]
    for number, (its, own) in enumerate(zip(first, here, strict=False)):
        found += [(f"{x} of product {number}", own.get(x), its.get(x)) for x in its | own]
    for what, ours, theirs in found:
        if ours != theirs:
            raise RankError(
                f"it differs from rank 0 in {what}, {ours!r:.100} and {theirs!r:.100}: share "
                f"winners in a group of equal ranks, which ask for the same products in one order"
            )
