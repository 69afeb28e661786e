"""The benchmark of fp8 and int8 products: its shapes, what a row holds, what the summary says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autotune_fakes import Machine, machine_without_gpu

from costmodel.data.measurement import Measurement
from costmodel.evaluation.heldout import eval_workloads
from costmodel.kernels.scaled import scaled_tiles
from costmodel.scaled.launch import tuned


@pytest.fixture
def bench(script: Any) -> Any:
    return script("bench_lowprecision")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    scaled_tiles.device_caches.clear()  # of another machine
    with machine_without_gpu(tmp_path / "kernels") as machine:
        machine.us = lambda launch: 1e-3  # torch, which this clock does not see, takes no time
        yield machine
        tuned.__dict__.pop("_costmodel", None)
        tuned.cache.clear()


class Session:
    """Launches each choice; the first takes 5 us, each other one 1 us more."""

    def compare(self, problem: Any, choices: list[Any], rounds: int) -> list[Measurement]:
        for choice in choices:
            for operands in problem.operands(None, 2):
                choice(operands)
        return [Measurement("ok", 5.0 + i, 5.0, 5.0, rounds) for i in range(len(choices))]


def test_shapes_are_enough_and_none_is_of_the_eval_list(bench: Any) -> None:
    shapes = {(p.m, p.n, p.k) for p in bench.problems(["row"])}
    assert len(shapes) >= 60
    assert {m for m, _, _ in shapes} >= {1, 8192}
    assert not {(n, k) for _, n, k in shapes} & {(w.n, w.k) for w in eval_workloads()}


@pytest.mark.parametrize("form", ["row", "tensor", "int8", "int32", "row_fast"])
def test_operands_and_the_check_of_results_fit_torch(bench: Any, form: str) -> None:
    problem = bench.Scaled(form, 32, 256, 512, "cpu")
    (operands,) = problem.operands(None, 1)
    call = operands[0]
    call[5].copy_(bench.by_torch(operands))
    assert bench.error_of(problem, call) < 0.01
    call[5][0, 0] += 1 + 2 * call[5].abs().max()
    assert bench.error_of(problem, call) > bench.WRONG


def test_a_row_has_our_best_beside_torch(
    bench: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "error_of", lambda problem, call: 0.001)
    row = bench.timed(Session(), bench.Scaled("row", 16, 256, 512, "cpu"))
    assert row["us"] == {"ours": 5.0, "torch": 6.0, "default": row["us"]["default"]}
    assert row["speedup"] == 1.2
    alone = bench.timed(Session(), bench.Scaled("block", 1, 256, 512, "cpu"))
    assert alone["us"] == {"ours": 5.0, "bfloat16": 6.0, "default": 5.0}
    assert alone["speedup"] is None
    found = bench.summarize([row, alone, {"form": "row", "failure": "no room"}])
    assert (found["rows"], found["failed"]) == (3, 1)
    assert found["row_small_geomean"] == found["block_over_bfloat16_geomean"] == 1.2


def test_a_wrong_result_is_no_row(
    bench: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "error_of", lambda problem, call: float("nan"))
    with pytest.raises(bench.CostModelError, match="off by nan"):
        bench.timed(Session(), bench.Scaled("row", 8, 256, 512, "cpu"))
