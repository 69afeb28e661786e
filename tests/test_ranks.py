"""Ranks of a process group take one decision: four real processes of gloo, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import costmodel
from costmodel.errors import InvalidInput
from costmodel.tuning.ranks import Ranks, epoch

pytestmark = [pytest.mark.fault("B29"), pytest.mark.slow]

SIZE = 4
PROGRAM = Path(__file__).with_name("rank_program.py")


def run(scenario: str, size: int, folder: Path) -> list[dict[str, Any] | None]:
    """What each rank found; None of one that died."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(size), str(folder),
             scenario],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            with process:  # waits, and closes what it wrote to
                process.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    expected = SIZE if scenario == "decide" else size - 1
    assert len([f for f in found if f is not None]) == expected, "\n".join(told)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By what was tried: what each rank got."""
    ranks = run("decide", SIZE, tmp_path_factory.mktemp("ranks"))
    names = list(ranks[0] or {})
    return {name: [rank[name] for rank in ranks if rank is not None] for name in names}


def same(values: list[Any]) -> Any:
    """The one that all ranks have."""
    assert all(value == values[0] for value in values), values
    return values[0]


def test_each_alone_goes_by_its_own_timings(found: dict[str, list[Any]]) -> None:
    assert len(set(found["alone"])) == SIZE, "else nothing below shows anything"
    assert found["alone again"] == found["alone"]


def test_in_a_group_nothing_is_timed_and_all_choose_alike(found: dict[str, list[Any]]) -> None:
    assert found["timed"] == [0] * SIZE
    first, second, last, _ = same(found["predicted"])
    assert first == second == last, "one bucket"
    assert same(found["in other modes"]) == [first] * 3
    assert same(found["in another group"]) == first


def test_what_cannot_be_alike_is_refused(found: dict[str, list[Any]]) -> None:
    assert "group=..." in same(found["exhaustive"])


def test_the_first_rank_decides_for_all(found: dict[str, list[Any]]) -> None:
    assert same(found["agreed"]) == found["alone"][0], "which had it in its cache"
    assert found["timed for it"] == [0] * SIZE
    own, *others = same(found["then"])
    assert own == found["alone"][0]
    assert all(others), "of the bucket's other m, too, all ranks launch the same"
    assert same(found["then in other modes"]) == [found["alone"][0]] * 2
    assert same(found["never"]) == found["alone"][0]
    assert same(found["cold"]) == found["alone"][0]
    assert found["timed when cold"] == [2, 0, 0, 0], "the winner, and the other m of its bucket"
    assert same(found["anew"]) == same(found["exhaustive then"]) == found["alone"][0]


def test_deterministic_goes_before_agreed(found: dict[str, list[Any]]) -> None:
    assert same(found["deterministic"]) == found["predicted"][0][0] != found["alone"][0]


def test_what_the_ranks_differ_in_is_named_on_all(found: dict[str, list[Any]]) -> None:
    assert "rank 2 of the group first: RankError: it differs from rank 0 in name" in same(
        found["other problems"]
    )
    assert "rank 1 of the group first: RankError: it differs" in same(found["more problems"])
    assert "the number of products, 2 and 1" in found["more problems"][0]
    assert "differs from rank 0 in mode of product 0" in same(found["other mode"])
    assert "device" in same(found["other device"])
    assert "NVIDIA H200" in found["other device"][0]


@pytest.mark.parametrize(
    ("what", "text"),
    [("no iterable", "1 of 4 ranks failed, rank 1 of the group first: InvalidInput"),
     ("cannot load", "1 of 4 ranks failed, rank 2 of the group first: LaunchError"),
     ("nothing to time with", "1 of 4 ranks failed, rank 0 of the group first: NotRecorded")],
)  # fmt: skip
def test_one_that_fails_is_an_error_on_all(
    found: dict[str, list[Any]], what: str, text: str
) -> None:
    assert same(found[what]).startswith(f"RankError: {text}")


def test_after_a_failure_none_holds_what_was_decided(found: dict[str, list[Any]]) -> None:
    assert same(found["after it"]) == found["predicted"][0][0]


def test_a_part_of_the_ranks_may_agree(found: dict[str, list[Any]]) -> None:
    first, second, *others = found["of a part"]
    assert first == second
    assert all(text.startswith("InvalidInput: group is a") for text in others)


@pytest.mark.fault("B27")
def test_a_killed_rank_is_no_hang(tmp_path: Path) -> None:
    first, last = run("die", 2, tmp_path)
    assert last is None
    assert first is not None
    assert "Error" in first["error"]


def test_without_a_group() -> None:
    assert epoch() == 0
    for group in (None, "world"):
        with pytest.raises(InvalidInput, match="init_process_group"):
            Ranks(group)
    with pytest.raises(InvalidInput, match="init_process_group"):
        costmodel.warmup([(8, 8, 8)], group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
