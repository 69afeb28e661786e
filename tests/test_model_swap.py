"""Saving over a model: whichever step fails, and to every reader, it is the old or the new."""

from __future__ import annotations

import builtins
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_recording import TARGET, write_recording

from costmodel.data.candidates import Candidates
from costmodel.errors import CostModelError, InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable, XgbCostModel, XgbParams, load

SMALL = Workload.dense(64, 96, 128)
STEPS = ("fsync", "replace", "unlink")
MORE_THAN_ALL = 36  # steps that a save takes


class Killed(BaseException):
    """What no handler of errors outlives."""


def make(table: TrainingTable, name: str, rounds: int, *, whole: bool) -> XgbCostModel:
    """A model; a whole one has artifacts and knows ``torch.matmul``."""
    if whole:  # as many products of torch's as it takes to learn from
        products = tuple(Workload.dense(64 * i, 256, 256) for i in range(1, 31))
        count = len(table.workloads)
        torch_us = (np.nan,) * count + (float(rounds),) * len(products)
        table = replace(table, workloads=(*table.workloads, *products), torch_us=torch_us)
    else:
        table = replace(table, artifacts=None, torch_us=())
    return XgbCostModel(XgbParams(rounds=rounds), name=name).fit(table)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TrainingTable:
    return TrainingTable.from_dataset(write_recording(tmp_path_factory.mktemp("swap") / "data"))


@pytest.fixture(scope="module", params=["whole over whole", "bare over whole", "whole over bare"])
def both(request: pytest.FixtureRequest, table: TrainingTable) -> tuple[XgbCostModel, XgbCostModel]:
    new, old = request.param.split(" over ")
    return (
        make(table, "old", 2, whole=old == "whole"),
        make(table, "new", 3, whole=new == "whole"),
    )


def signature(model: XgbCostModel) -> tuple[Any, ...]:
    torch_us = model.predict_torch(SMALL, TARGET)
    return model.name, model.hash, sorted(model.artifacts or ()), np.nan_to_num(torch_us)


@contextmanager
def each_step(act: Callable[[int], None]) -> Iterator[None]:
    """Calls ``act`` with its number before each step that changes a file system."""
    originals = {name: getattr(os, name) for name in STEPS}
    count, inside = 0, False

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal count, inside
            if not inside:
                inside, count = True, count + 1
                try:
                    act(count)
                finally:
                    inside = False
            return original(*arguments, **options)

        return step

    def opening(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        opened = counted(real_open) if "x" in mode else real_open
        return opened(path, mode, *arguments, **options)

    real_open = builtins.open
    with pytest.MonkeyPatch.context() as patch:
        for name, original in originals.items():
            patch.setattr(os, name, counted(original))
        patch.setattr(builtins, "open", opening)
        yield


def full_once(step: int) -> Callable[[int], None]:
    def act(count: int) -> None:
        if count == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    return act


def killed_at(step: int) -> Callable[[int], None]:
    def act(count: int) -> None:
        if count >= step:
            raise Killed

    return act


@pytest.mark.fault("B21", "B54")
@pytest.mark.parametrize("fault", [full_once, killed_at])
def test_whatever_fails_the_old_or_the_new_model_is_there(
    both: tuple[XgbCostModel, XgbCostModel], tmp_path: Path, fault: Callable[..., Any]
) -> None:
    old, new = both
    path, found = tmp_path / "model", []
    for step in range(1, MORE_THAN_ALL):
        old.save(path)
        with each_step(fault(step)), suppress(CostModelError, Killed):
            new.save(path)
        there = load(path)
        found.append(there.name)
        assert signature(there) == signature(old if there.name == "old" else new), step
    assert found.count("old") >= 8, "each file is a few steps"
    assert found[-1] == "new"


@pytest.mark.fault("B21")
def test_what_no_card_names_any_more_goes_with_the_next_save(
    both: tuple[XgbCostModel, XgbCostModel], tmp_path: Path
) -> None:
    old, new = both
    path = old.save(tmp_path / "model")
    for step in range(1, MORE_THAN_ALL, 4):
        with each_step(killed_at(step)), suppress(Killed):
            new.save(path)
    new.save(path)
    new.save(path)
    named = set(json.loads((path / "card.json").read_text())["files"].values())
    there = {p.name for p in path.iterdir() if not p.name.endswith(".tmp")}
    assert there == named | {"card.json"}
    assert signature(load(path)) == signature(new)


@pytest.mark.fault("B21")
def test_who_reads_meanwhile_finds_one_model(
    both: tuple[XgbCostModel, XgbCostModel], tmp_path: Path
) -> None:
    old, new = both
    path, found = old.save(tmp_path / "model"), []

    def read(_: int) -> None:
        there = load(path)
        assert signature(there) == signature(old if there.name == "old" else new)
        found.append(there.name)

    with each_step(read):
        new.save(path)
    assert found == sorted(found, reverse=True), "never the old one again"
    assert set(found) == {"old", "new"}


@pytest.mark.fault("B21")
def test_a_reader_that_began_with_the_old_card_finds_its_parts(
    both: tuple[XgbCostModel, XgbCostModel], tmp_path: Path
) -> None:
    old, new = both
    path = old.save(tmp_path / "model")
    began = XgbCostModel.load(path, parse=False)
    new.save(path)
    batch = Candidates.of([GemmConfig("pointer", 64, 64, 32)])
    expected = old.predict(SMALL, batch, TARGET)
    np.testing.assert_array_equal(began.predict(SMALL, batch, TARGET), expected)


@pytest.mark.fault("B21", "B54")
def test_the_first_save_leaves_a_whole_model_or_none(table: TrainingTable, tmp_path: Path) -> None:
    model = make(table, "new", 2, whole=True)
    for step in range(1, MORE_THAN_ALL):
        path = tmp_path / str(step)
        with each_step(killed_at(step)), suppress(Killed):
            model.save(path)
        if (path / "card.json").exists():
            assert signature(load(path)) == signature(model)
        model.save(path)
        assert signature(load(path)) == signature(model)


@pytest.mark.fault("B54")
@pytest.mark.parametrize(
    "change",
    [{"name": 5}, {"name": None}, {"params": XgbParams(rounds=2, nearness=float("nan"))},
     {"params": XgbParams(rounds=2, max_depth="8")}, 
     {"training": {"note": object()}}],
)  # fmt: skip
def test_what_could_not_be_loaded_is_refused_before_anything_is_written(
    table: TrainingTable, tmp_path: Path, change: dict[str, Any]
) -> None:
    old, new = make(table, "old", 2, whole=True), make(table, "new", 2, whole=False)
    path = old.save(tmp_path / "model")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    new.card = replace(new.card, **change)
    new.name = new.card.name
    with pytest.raises(InvalidInput, match="could not be loaded again"):
        new.save(path)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_numbers_of_numpy_are_numbers(table: TrainingTable, tmp_path: Path) -> None:
    params = XgbParams(rounds=2, max_depth=np.int64(4), floor=np.float32(0.25))
    saved = XgbCostModel(params).fit(table).save(tmp_path / "model")
    assert load(saved).params == XgbParams(rounds=2, max_depth=4, floor=0.25)
