"""The held-out rule: what a model is judged on never gets into what it learns from."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.evaluation.heldout import (
    eval_list,
    eval_pairs,
    eval_workloads,
    is_held_out,
    is_ragged,
)
from costmodel.gemm.workload import Workload

EVAL_CSV = Path(__file__).parent.parent / "benchmarks" / "eval.csv"


def test_the_list_is_that_of_the_file() -> None:
    with EVAL_CSV.open(newline="") as file:
        rows = [(r["name"], int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)]
    assert [(e.name, e.m, e.n, e.k) for e in eval_list()] == rows
    assert len(rows) == 78
    assert len(eval_pairs()) == 27


def test_eval_workloads_are_dense_and_distinct() -> None:
    half = eval_workloads()
    assert len(set(half)) == 78
    assert half[0] == Workload.dense(1, 4096, 4096)
    assert {w.code.dtype for w in eval_workloads("bfloat16")} == {"bfloat16"}


@given(st.sampled_from(eval_list()), st.integers(1, 200_000), st.sampled_from(["row", "col"]))
def test_every_eval_pair_is_held_out_with_any_m_and_in_any_disguise(
    e: object, other: int, layout: str
) -> None:
    n, k = e.n, e.k  # type: ignore[attr-defined]
    for m_n_k in ((other, n, k), (n, other, k), (other, k, n)):
        workload = Workload.dense(*m_n_k, "bfloat16", a_layout=layout)  # type: ignore[arg-type]
        assert is_held_out(workload)


@pytest.mark.parametrize(
    ("n", "k", "held_out"),
    [
        (1000, 5000, True),
        (1020, 5100, True),  # 2 % and 2 %
        (980, 4900, True),
        (1021, 5000, False),
        (979, 5000, False),
        (1000, 5101, False),
        (1000, 4899, False),
        (5000, 1000, True),  # the same weights, read the other way
        (3000, 9000, False),
    ],
)
def test_near_means_both_within_two_percent(
    n: int, k: int, held_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costmodel.evaluation.heldout.eval_pairs", lambda: [(1000, 5000)])
    assert is_held_out(Workload.dense(77, n, k)) == held_out
    # Its operand-swapped twin: m takes the place of n.
    if held_out and n < k:
        assert is_held_out(Workload.dense(n, 77, k))


def test_the_rule_leaves_most_of_the_ground() -> None:
    sizes = [48, 200, 640, 1536, 3584, 5120, 9216, 18944, 32000]
    shapes = [(m, n, k) for m in (3, 700) for n in sizes for k in sizes]
    assert not any(is_held_out(Workload.dense(*shape)) for shape in shapes)


def test_aligned_and_ragged() -> None:
    kinds = [is_ragged(w) for w in eval_workloads()]
    assert kinds == [False] * 68 + [True] * 10
    assert is_ragged(Workload.dense(64, 4096, 1000))
    assert is_ragged(Workload.dense(64, 1001, 1024))
    assert not is_ragged(Workload.dense(77, 4096, 1024))
    assert is_ragged(Workload.dense(77, 4096, 1024, a_layout="col"))  # then m is a stride
