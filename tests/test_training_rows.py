"""Which rows of a dataset are trained on, and in which order: nothing held out, files no matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_examples import PROTOCOL, RUN, TARGET, A, ok, records
from made_up_recording import write_recording
from test_cli import run, run_json
from test_cli_faults import HERE, refused

import costmodel
from costmodel.collect.sampling import read_worklist
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity
from costmodel.errors import InvalidInput
from costmodel.evaluation.heldout import HELD_OUT, eval_workloads, is_held_out
from costmodel.gemm.workload import MOST, Workload
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol
from costmodel.models import TrainingTable, XgbParams

TINY = XgbParams(rounds=5)
DISGUISES = [
    Workload.dense(48, 4096, 4096),
    Workload.dense(48, 4100, 4090, "bfloat16"),
    Workload.dense(4096, 80, 4096),
    Workload.dense(32, 8192, 1024, b_layout="col"),
]
SHAPES = "m,n,k\n64,640,512\n16,4096,4096\n4096,77,4096\n"


def shapes(folder: Path, text: str) -> Path:
    path = folder / "shapes.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("workload", DISGUISES, ids=str)
def test_what_is_held_out_is_not_trained_on_though_it_was_recorded_for_that(
    tmp_path: Path, workload: Workload
) -> None:
    dataset = Dataset.create(tmp_path / "data", TARGET, PROTOCOL)
    assert is_held_out(workload)
    rows = records(workload)
    dataset.append_measurements(rows, run=RUN, torch={workload: ok(5.0)})
    with pytest.raises(InvalidInput, match=f"role eval, {len(rows)} {HELD_OUT}; expected rows"):
        costmodel.train(dataset, params=TINY)
    dataset.append_measurements(records(A), run=RUN)
    found = TrainingTable.from_dataset(dataset)
    assert found.workloads == (A,)
    assert found.not_learned_from() == {HELD_OUT: len(rows)}
    assert costmodel.train(dataset, params=TINY).card.training["dropped"] == {HELD_OUT: len(rows)}


def test_what_is_judged_by_is_read_whole(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "data", TARGET, PROTOCOL)
    dataset.append_measurements(records(DISGUISES[0]), run=RUN, role="eval")
    assert TrainingTable.from_dataset(dataset, "eval").workloads == (DISGUISES[0],)


def test_a_dataset_is_learned_from_with_its_artifacts(tmp_path: Path) -> None:
    dataset = write_recording(tmp_path / "data")
    found = TrainingTable.from_dataset(dataset)
    assert set(found.workloads) == set(dataset.workloads("train")) < set(dataset.workloads())
    model = costmodel.train(dataset, params=TINY)
    assert model.card.training["rows"] == found.ok.sum()
    known = costmodel.load(model.save(tmp_path / "model")).artifacts
    assert known is not None
    assert dict(known) == dict(dataset.artifacts())


def test_merging_the_files_makes_no_other_model(tmp_path: Path) -> None:
    dataset, later = write_recording(tmp_path / "data"), replace(RUN, run_id="run-2")
    dataset.append_measurements(records(A)[::-1], run=later, torch={A: ok(5.0)})
    before = TrainingTable.from_dataset(Dataset.open(dataset.path))
    dataset.compact()
    after = TrainingTable.from_dataset(Dataset.open(dataset.path))
    assert after.workloads == before.workloads
    assert after.candidates.configs == before.candidates.configs
    np.testing.assert_array_equal(after.torch_us, before.torch_us)
    assert after.content_hash() == before.content_hash()
    one, other = (costmodel.models.train(t, params=TINY) for t in (before, after))
    assert one.hash == other.hash


def test_each_row_keeps_its_own_latency_when_rows_are_put_in_order(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "data", TARGET, PROTOCOL)
    rows = records(A)
    dataset.append_measurements(rows[::-1], run=RUN)
    found = TrainingTable.from_dataset(dataset)
    times = dict(zip(found.candidates.configs, found.latency_us.tolist(), strict=True))
    assert times == {row.config: row.measurement.latency_us for row in rows}


# --- costmodel collect --shapes ----------------------------------------------------------------


def drawn(path: Path) -> list[tuple[Workload, str]]:
    identity = Identity(Target.named("h100-sxm"), TimingProtocol().to_dict())
    return [(job.workload, job.role) for job in read_worklist(path, identity)]


def test_shapes_that_are_held_out_are_left_out_in_one_line(tmp_path: Path) -> None:
    path, out = shapes(tmp_path, SHAPES), tmp_path / "list.parquet"
    command = ("collect", "--shapes", path, "--write-worklist", out, "--configs", 5, *HERE)
    told = run(*command)
    assert told.exit_code == 0
    (line,) = (x for x in told.stderr.splitlines() if "held out" in x)
    assert line.startswith("2 of 3 workloads left out")
    assert drawn(out) == [(Workload.dense(64, 640, 512), "train")]
    assert "held out" not in run(*command, "--role", "eval").stderr
    assert [role for _, role in drawn(out)] == ["eval"] * 3


def test_nothing_but_held_out_shapes_is_an_error(tmp_path: Path) -> None:
    csv = Path(__file__).parents[1] / "benchmarks" / "eval.csv"
    command = ("collect", "--write-worklist", tmp_path / "list", "--configs", 1, *HERE)
    line = refused(*command, "--shapes", csv, "--dtypes", "float16,tf32")
    assert f"all {2 * len(eval_workloads())} workloads are held out" in line
    assert "--role eval" in line
    assert not (tmp_path / "list").exists()
    assert "--shapes" in refused_option(*command, "--role", "eval")


def refused_option(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_size_that_nothing_can_run_is_told(tmp_path: Path) -> None:
    path = shapes(tmp_path, f"m,n,k\n64,640,512\n{MOST},{MOST},64\n")
    command = ("collect", "--write-worklist", tmp_path / "list", "--configs", 5, *HERE)
    told = run(*command, "--shapes", path, "--json")
    assert f"{MOST}x{MOST}x64" in told.stderr
    assert "no configuration runs it on h100-sxm" in told.stderr
    found = run_json(*command, "--shapes", path)
    assert (found["workloads"], found["rows"]) == (1, 5)
    alone = shapes(tmp_path, f"m,n,k\n{MOST},{MOST},64\n")
    assert "no configuration runs on h100-sxm" in refused(*command, "--shapes", alone)


def test_a_product_that_nothing_can_run_is_not_compiled() -> None:
    line = refused("compile", MOST, MOST, 64, "--target", "a100-sxm")
    assert "no configuration to compile" in line


@pytest.mark.parametrize("seed", [-1, -(2**40)])
def test_a_seed_under_0_is_refused(tmp_path: Path, seed: int) -> None:
    told = refused_option("collect", f"--seed={seed}", "--write-worklist", tmp_path / "x", *HERE)
    assert "--seed" in told


@pytest.mark.parametrize("top", ["--5", "---", "-", "", "9" * 5000, "-" + "9" * 5000, "²"])
def test_a_top_that_is_no_number_is_refused(top: str) -> None:
    assert "--top" in refused_option("tune", 64, 64, 64, f"--top={top}")
