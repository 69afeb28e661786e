"""Whatever is passed, or set around us: an error of ours, never a traceback of a library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_examples import RESULT, TARGET, A, write_dataset

import costmodel
from costmodel.cli.common import print_table
from costmodel.data.dataset import Dataset
from costmodel.errors import CostModelError, InvalidInput, NoGpu, UnknownTarget
from costmodel.files import cache_directory
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target
from costmodel.models.baselines import RuleHeuristic
from costmodel.tuning.shipped import recording
from costmodel.tuning.tuner import tune
from costmodel.tuning.winner_cache import WinnerCache


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data")


# --- arguments -------------------------------------------------------------------------------

NO_PATHS: tuple[Any, ...] = (5, None, [], b"x", object(), float("nan"), "a\0b", "x" * 5000)


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda v: str(v)[:10].replace("\0", "0"))
def test_what_is_no_path(path: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Dataset.open(path), lambda: costmodel.train(path),
        lambda: Dataset.create(path, TARGET, {}),
    ]  # fmt: skip
    if path is not None:  # which is the default model
        calls += [lambda: costmodel.use(path), lambda: costmodel.rank(A, TARGET, path, 1)]
    for call in calls:
        with pytest.raises(CostModelError, match=r"path|directory|too long"):
            call()


@pytest.mark.parametrize(
    "arguments",
    [{"workload": "1024x1024x1024"}, {"workload": None}, {"target": "h100-sxm"}, {"k": "8"},
     {"k": 1.5}, {"k": float("nan")}, {"k": True}, {"k": -1}, {"model": object()},
     {"configs": "tma"}, {"configs": [None]}, {"configs": 5}],
)  # fmt: skip
def test_rank_says_what_it_expects(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        costmodel.rank(**{"workload": A, "target": TARGET, "k": 1, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [{"k": "8"}, {"k": 1.5}, {"k": 0}, {"budget_s": float("nan")}, {"budget_s": "1"},
     {"budget_s": -1}, {"mode": []}, {"mode": 5}, {"model": 5}, {"runner": "replay"},
     {"workload": (1, 2, 3)}],
)  # fmt: skip
def test_tune_says_what_it_expects(dataset: Dataset, arguments: dict[str, Any]) -> None:
    runner = costmodel.ReplayRunner(dataset)
    with pytest.raises(InvalidInput, match="expected"):
        tune(**{"workload": A, "runner": runner, "model": RuleHeuristic(), **arguments})


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Target:
        raise NoGpu("there is none")

    monkeypatch.setattr(Target, "current", none)


@pytest.mark.fault("B11")
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "arguments",
    [{"problems": 5}, {"problems": "64"}, {"problems": [64, 64, 64]}, {"problems": [(64, 64)]},
     {"problems": ["abc"]}, {"problems": [None]}, {"problems": [(64, 64, "64")]},
     {"problems": [(64, 64, -1)]}, {"problems": [(64, 64, 64), (1.5, 2, 3)]}, {"mode": "fast"},
     {"mode": []}, {"dtype": "int8"}, {"out_dtype": "int8"}, {"dtype": "float16", "tf32": True},
     {"activation": "tanh"}, {"model": 5}, {"model": "/nowhere/at/all"}],
    ids=str,
)  # fmt: skip
def test_a_warmup_is_checked_without_a_gpu(arguments: dict[str, Any]) -> None:
    with pytest.raises(CostModelError, match=r"expected|kernel|no model") as told:
        costmodel.warmup(**{"problems": [(64, 64, 64)], **arguments})
    assert not isinstance(told.value, NoGpu)
    with pytest.raises(NoGpu):
        costmodel.warmup(iter([(64, 64, 64), [64, 64, 64], A]), mode="background")


@pytest.mark.fault("B11")
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "arguments",
    [{"k": 0}, {"k": "auto"}, {"k": 1.5}, {"budget_s": 0}, {"budget_s": "1"}, {"mode": "fast"},
     {"mode": "never"}, {"dtype": "int8"}, {"model": 5}, {"model": "/nowhere/at/all"},
     {"problem": (0, 64, 64)}, {"problem": (64, 64)}],
    ids=str,
)  # fmt: skip
def test_tuning_is_checked_without_a_gpu(arguments: dict[str, Any]) -> None:
    problem = arguments.pop("problem", (64, 64, 64))
    with pytest.raises(CostModelError, match=r"expected|no model") as told:
        costmodel.tune(*problem, **arguments)
    assert not isinstance(told.value, NoGpu)
    with pytest.raises(NoGpu):
        costmodel.tune(64, 64, 64, k=3, budget_s=1)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("config", ["tma 128x256", "", "Torch", b"tma", None, ("tma", 128), 5])
def test_what_is_pinned_is_a_configuration(config: Any) -> None:
    with pytest.raises(InvalidInput, match="'tma 128x256x64 w8 s4 g8'"):
        costmodel.pin(config, 64, 64, 64)
    for name in ("torch", "tma 64x32x128 w4 s6 g8"):
        with pytest.raises(NoGpu):
            costmodel.pin(name, 64, 64, 64)


X = torch.zeros(4, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    "options",
    [{"a": 5}, {"b": "x"}, {"a": X.to_sparse()}, {"b": X.float()}, {"a": X[:, :3]}, {"a": X.int()},
     {"mode": "fast"}, {"mode": []}, {"mode": 5}, {"model": 5}, {"model": []}, {"bias": X},
     {"activation": "tanh"}, {"tf32": True}, {"out_dtype": "float16"}, {"out": X},
     {"out": X[:2]}, {"a": X[None], "b": X[None].float()}, {}],
)  # fmt: skip
def test_result_for_refuses_what_matmul_refuses(options: dict[str, Any]) -> None:
    """Of plain operands their place, which is no GPU."""
    call = {"a": X, "b": X, **options}
    told = []
    for function in (costmodel.matmul, costmodel.result_for):
        with pytest.raises(CostModelError) as error:
            function(**call)
        told.append((type(error.value), str(error.value)))
    assert told[0] == told[1]


def test_types_of_ours_say_what_they_expect() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Workload(1, 1, 1, "float16"),  # type: ignore[arg-type]
        lambda: Workload.dense(1, 1, 1, []),  # type: ignore[arg-type]
        lambda: CodeClass(bias=10**9), lambda: CodeClass(wide="yes"),  # type: ignore[arg-type]
        lambda: CodeClass(a_align=16.0), lambda: CodeClass(activation=[]),  # type: ignore[arg-type]
        lambda: Target.named([]), lambda: costmodel.ReplayRunner("data"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CostModelError, match="expected"):
            call()


@pytest.mark.fault("B53")
@pytest.mark.parametrize("name", ["../../etc", "/tmp", "", "a/b", "h100\n"])
def test_a_target_is_no_path(name: str) -> None:
    with pytest.raises(UnknownTarget, match="expected a short name"):
        recording(name)


# --- the environment and the terminal --------------------------------------------------------


@pytest.mark.fault("B22")
def test_a_tilde_in_the_cache_directory_is_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", "~/winners")
    assert cache_directory() == tmp_path / "winners"


@pytest.mark.fault("B22")
def test_a_working_directory_that_is_gone_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", "relative")
    cache = WinnerCache()
    with pytest.warns(RuntimeWarning, match="working directory was removed"):
        cache.put({"name": "w"}, RESULT)
    assert cache.get({"name": "w"}) is None


def test_brackets_in_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("of [/here]", ["error"], [["expected [/] or [bold]"]])
    assert "of [/here]" in (out := capsys.readouterr().out)
    assert "expected [/] or [bold]" in out


def test_a_terminal_without_a_dash_prints_something_else() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "costmodel", "rank", "64", "64", "64"]
    done = subprocess.run(
        [*command, "--target", "h100-sxm", "--top", "1"], env=environment, capture_output=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.isascii()
