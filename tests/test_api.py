"""The public names, and that importing them asks for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import costmodel

NAMES = {
    "Dataset", "Explanation", "GemmConfig", "Ranking", "ReplayRunner", "Stats", "Target",
    "TuningResult", "Workload", "__version__", "autotune", "explain", "int_mm", "load", "matmul",
    "pin", "prune_configs_by", "rank", "replace_triton_autotune", "result_for", "scaled_mm",
    "set_buckets", "set_mode", "stats", "train", "tune", "unpin", "use", "warmup",
}  # fmt: skip


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter without a GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


def test_all_is_what_is_promised_and_nothing_more() -> None:
    from costmodel import errors

    assert set(costmodel.__all__) == NAMES | set(errors.__all__)
    assert sorted(set(costmodel.__all__)) == costmodel.__all__
    for name in costmodel.__all__:
        assert getattr(costmodel, name) is not None
    assert set(costmodel.__all__) <= set(dir(costmodel))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        costmodel.nonsense  # noqa: B018


@pytest.mark.fault("B11")
def test_importing_is_light_and_touches_nothing(tmp_path: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import costmodel
heavy = {"torch", "triton", "numpy", "xgboost", "pyarrow", "joblib", "sklearn", "rich", "typer"}
print(sorted(heavy & {m.split(".")[0] for m in set(sys.modules) - before}))
"""
    done = run(code, HOME=str(tmp_path))
    assert done.stdout == "[]\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("B11")
def test_without_a_gpu_everything_imports_and_matmul_says_so(tmp_path: Path) -> None:
    code = """
import costmodel, torch
for name in costmodel.__all__:
    getattr(costmodel, name)
assert not torch.cuda.is_initialized()
a = torch.ones(8, 8, dtype=torch.float16)
for call in (
    lambda: costmodel.matmul(a, a),
    lambda: costmodel.tune(8, 8, 8),
    lambda: costmodel.warmup([(8, 8, 8)]),
    lambda: costmodel.rank(costmodel.Workload.dense(8, 8, 8)),
):
    try:
        call()
    except costmodel.CostModelError as error:
        assert "GPU" in str(error), error
    else:
        raise AssertionError("no error")
"""
    done = run(code, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_train_takes_a_path_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(costmodel.MissingData, match=r"card\.json"):
        costmodel.train(tmp_path)
    with pytest.raises(costmodel.NoModel):
        costmodel.use(tmp_path / "none")


def test_tune_takes_three_ways_to_say_what() -> None:
    with pytest.raises(costmodel.InvalidInput, match="expected m, n, k, or a Workload"):
        costmodel.tune(1, 2)
    with pytest.raises(costmodel.InvalidInput, match="expected m, n, k, or a Workload"):
        costmodel.tune("1x2x3")
