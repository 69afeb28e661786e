"""One description of work, cut and joined again: parts, GPUs, budgets; a recording stands for them.

Each command runs in a process of its own, as on the machines of a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from made_up_recording import RECORDED, TARGET, TRAINING, write_recording
from pyarrow import parquet
from test_cli import run as run_here

from costmodel.collect import Job, Progress
from costmodel.collect.machine import visible_gpus
from costmodel.collect.parts import merge, part_of, plan, recorded_jobs
from costmodel.collect.sampling import by_doubt
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.errors import CorruptFile, MissingData, MixedData, NoGpu
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.measure.card import collecting
from costmodel.models.baselines import RuleHeuristic

Row = tuple[str, ...]


def rows_of(folder: Path) -> Counter[Row]:
    """Workload, configuration, role and outcome of each row on disk, anchors left out."""
    found: Counter[Row] = Counter()
    names = ("workload", *GemmConfig("pointer", 16, 16, 16, 1, 1).to_dict(), "status", "latency_us")
    for path in folder.glob("measurements*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            if row["role"] != "anchor":
                found[*(str(row[name]) for name in (*names, "role"))] += 1
    return found


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``costmodel collect``."""
    return subprocess.run(
        [sys.executable, "-m", "costmodel", "collect", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = write_recording(tmp_path_factory.mktemp("recorded") / "data")
    dataset.compact()
    return dataset.path


@pytest.fixture(scope="module")
def whole(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one machine makes of it."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    done = command("--replay", recording, "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_replay_records_what_was_recorded(recording: Path, whole: Path) -> None:
    assert rows_of(whole) == rows_of(recording)
    assert set(rows_of(whole).values()) == {1}
    (run,) = Dataset.open(whole).measurements().runs
    assert run.device_uuid.startswith("replay"), "no row passes for one of a card"


def test_parts_of_any_number_are_the_whole_and_share_nothing() -> None:
    jobs = [Job(w, (GemmConfig("pointer", 16, 16, 16, 1, 1),)) for w in TRAINING]
    for parts in (1, 2, 3, 5, 9):
        with_anchors = [part_of(jobs, i + 1, parts) for i in range(parts)]
        cut = [[job for job in part if job.role != "anchor"] for part in with_anchors]
        assert sorted(str(job) for part in cut for job in part) == sorted(map(str, jobs))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.fault("B64")
def test_all_parts_begin_with_the_same_anchors_and_keep_those_that_they_are_given() -> None:
    configs = tuple(GemmConfig("pointer", 16, 16, 16, warps, 1) for warps in (1, 2))
    jobs = [Job(workload, configs) for workload in TRAINING]
    one, other = part_of(jobs, 1, 2), part_of(jobs[::-1], 2, 2)
    anchors = [job for job in one if job.role == "anchor"]
    assert anchors
    assert all(job.workload.bytes() >= 2**24 and len(job.configs) == 1 for job in anchors)
    assert one[: len(anchors)] == other[: len(anchors)] == anchors
    again = part_of(one[: len(anchors) + 1], 1, 1)  # as a chunk that travels alone
    assert again == one[: len(anchors) + 1]


def timed_by(folder: Path, cards: dict[str, float]) -> list[Path]:
    """Make a part for each card, with an anchor and a row of its own that took so long."""
    parts = [folder / card for card in cards]
    anchor, own = (GemmConfig("pointer", 16, 16, 16, warps, 1) for warps in (1, 2))
    for i, (path, us) in enumerate(zip(parts, cards.values(), strict=True)):
        dataset = Dataset.create(path, TARGET, {})
        run = RunInfo(path.name, path.name, "", "", path.name)
        row = TuningRecord(TRAINING[-1], anchor, "key", Measurement("ok", us))
        dataset.append_measurements([row], run=run, role="anchor")
        row = TuningRecord(TRAINING[i], own, "key", Measurement("ok", us))
        dataset.append_measurements([row], run=run)
    return parts


@pytest.mark.fault("B64")
@pytest.mark.parametrize(
    ("cards", "apart"),
    [({"a": 10.0, "b": 10.4, "c": 10.1}, set()), ({"a": 10.0, "b": 10.8, "c": 10.1}, {"b"}),
     ({"a": 9.0, "b": 10.0, "c": 10.1}, {"a"}), ({"a": 10.6, "b": 10.0}, {"a"}),
     ({"a": 10.0}, set())],
)  # fmt: skip
def test_a_card_that_is_apart_from_its_twins_is_flagged_and_not_learned_from(
    cards: dict[str, float], apart: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merged = merge(tmp_path / "all", timed_by(tmp_path, cards))
    twins = json.loads((merged.path / "card.json").read_text())["counts"]["twins"]
    assert set(twins) == (set(cards) if len(cards) > 1 else set())
    assert {card for card, factor in twins.items() if abs(factor - 1) > 0.05} == apart
    assert [f"card {card} takes" in caplog.text for card in cards] == [c in apart for c in cards]
    frame = merged.frame("train")
    assert len(frame) == len(cards) - len(apart)
    assert sum(frame.dropped.values()) == len(apart)
    assert len(merged.measurements("train")) == len(cards), "its rows are there"


@pytest.mark.slow
@pytest.mark.fault("B33")
def test_merged_parts_are_what_one_machine_makes(
    recording: Path, whole: Path, tmp_path: Path
) -> None:
    parts = [tmp_path / f"part-{i}" for i in (1, 2, 3)]
    for i, folder in enumerate(parts):
        done = command("--replay", recording, "--part", f"{i + 1}/3", "--out", folder)
        assert done.returncode == 0, done.stderr
    for _ in range(2):  # again it changes nothing
        done = command("--merge", *parts, "--out", tmp_path / "all", "--json")
        assert done.returncode == 0, done.stderr
        assert rows_of(tmp_path / "all") == rows_of(whole)
    assert json.loads(done.stdout)["workloads"] == 8
    assert len(Dataset.open(tmp_path / "all").artifacts()) == len(Dataset.open(whole).artifacts())


@pytest.mark.slow
@pytest.mark.fault("B33")
def test_each_gpu_that_is_named_times_its_part(
    recording: Path, whole: Path, tmp_path: Path
) -> None:
    gpus = ["3", "GPU-1f0a", "MIG-77"]
    done = command("--replay", recording, "--out", tmp_path / "data", "--json",
                   CUDA_VISIBLE_DEVICES=",".join(gpus))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "data") == rows_of(whole)
    cards = [run.device_uuid for run in Dataset.open(tmp_path / "data").measurements().runs]
    assert sorted(card.rpartition("-")[0] for card in cards) == [f"replay-{gpu}" for gpu in gpus]
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {event["gpu"] for event in events} == set(gpus)
    assert json.loads(done.stdout)["jobs_done"] == 8


@pytest.mark.slow
@pytest.mark.fault("B33")
def test_machines_with_different_numbers_of_gpus_share_a_list(
    recording: Path, whole: Path, tmp_path: Path
) -> None:
    parts = [tmp_path / "small", tmp_path / "large"]
    for i, (folder, gpus) in enumerate(zip(parts, ("0", "0,1,2"), strict=True)):
        done = command("--replay", recording, "--part", f"{i + 1}/2", "--out", folder,
                       CUDA_VISIBLE_DEVICES=gpus)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert not set(Dataset.open(parts[0]).workloads()) & set(Dataset.open(parts[1]).workloads())
    assert rows_of(merge(tmp_path / "all", parts).path) == rows_of(whole)


@pytest.mark.slow
@pytest.mark.fault("B33")
def test_each_rank_of_torchrun_times_its_part_on_its_own_gpu(
    recording: Path, whole: Path, tmp_path: Path
) -> None:
    """Two machines with two GPUs each, all of which write into one folder."""
    for rank in range(4):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
        done = command("--replay", recording, "--out", tmp_path / "data",
                       CUDA_VISIBLE_DEVICES="3,GPU-1f0a", **ranks)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "data") == rows_of(whole)
    runs = Dataset.open(tmp_path / "data").measurements("train", "eval").runs
    cards = sorted(run.device_uuid.rpartition("-")[0] for run in runs)
    assert cards == ["replay-3", "replay-3", "replay-GPU-1f0a", "replay-GPU-1f0a"]


@pytest.mark.parametrize(
    ("named", "rank", "expected"),
    [(None, None, ["0", "1", "2", "3"]), ("3,1", None, ["3", "1"]), ("", None, []),
     ("GPU-a, MIG-b", None, ["GPU-a", "MIG-b"]), ("2,-1,0", None, ["2"]),
     ("3,1", "1", ["1"]), (None, "2", ["2"])],
)  # fmt: skip
@pytest.mark.fault("B33")
def test_gpus_are_named_as_cuda_names_them(
    named: str | None, rank: str | None, expected: list[str]
) -> None:
    given = {"CUDA_VISIBLE_DEVICES": named, "LOCAL_RANK": rank}
    environment = {name: value for name, value in given.items() if value is not None}
    assert visible_gpus(environment, lambda: 4) == expected


def test_two_collections_do_not_share_a_gpu(tmp_path: Path) -> None:
    card = f"GPU-{tmp_path.name}-{os.getpid()}"
    for _ in range(2):  # its end gives it back
        with collecting(card):
            with (
                pytest.raises(NoGpu, match=f"{card}: another.*CUDA_VISIBLE_DEVICES"),
                collecting(card),
            ):
                pass
            with collecting(f"{card}-b"):
                pass


@pytest.mark.slow
def test_a_gpu_that_fails_costs_its_part_only(recording: Path, whole: Path, tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    shutil.copytree(recording, copy)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('CUDA_VISIBLE_DEVICES') == '6':\n"
        "    import sys; sys.exit('this GPU has fallen off the bus')"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    options = ("--replay", copy, "--out", folder)
    done = command(*options, CUDA_VISIBLE_DEVICES="5,6", PYTHONPATH=path)
    assert done.returncode == 2
    assert "this GPU has fallen off the bus" in done.stderr
    assert "error: GPU 6 did not finish" in done.stderr
    assert 0 < len(rows_of(folder)) < len(rows_of(whole))
    done = command(*options, CUDA_VISIBLE_DEVICES="5,6")
    assert done.returncode == 0, done.stderr
    assert rows_of(folder) == rows_of(whole)


def test_without_ray_its_engine_says_how_to_install_it(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    options = ("--replay", recording, "--out", tmp_path / "data", "--engine", "ray")
    done = command(*options, PYTHONPATH=path)
    assert done.returncode == 2
    assert "pip install 'ray>=2.60'" in done.stderr


# --- What must not be merged ----------------------------------------------------------------------


def test_other_devices_toolchains_and_protocols_are_not_merged(tmp_path: Path) -> None:
    one = write_recording(tmp_path / "one")
    others: dict[str, Any] = {
        "device": {"target": Target.named("h200-sxm", TARGET.toolchain)},
        "toolchain": {"target": Target(TARGET.device, Toolchain("3.7.0", "12.8"))},
        "protocol": {"protocol": {"repeats": 9}},
    }
    for name, changed in others.items():
        Dataset.create(tmp_path / name, **{"target": TARGET, "protocol": {"repeats": 5}} | changed)
        with pytest.raises(MixedData, match=f"{name}.*must not mix"):
            merge(tmp_path / "all", [one.path, tmp_path / name])
        assert not (tmp_path / "all").exists()


def test_what_is_no_dataset_is_not_merged(tmp_path: Path) -> None:
    one = write_recording(tmp_path / "one")
    with pytest.raises(MissingData, match="nowhere"):
        merge(tmp_path / "all", [one.path, tmp_path / "nowhere"])
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "card.json").write_text("[]")
    with pytest.raises(CorruptFile, match="odd"):
        merge(tmp_path / "all", [one.path, tmp_path / "odd"])
    assert not (tmp_path / "all").exists()


def test_of_a_row_in_two_parts_one_is_kept(tmp_path: Path) -> None:
    config = GemmConfig("pointer", 16, 16, 16, 1, 1)
    for name, us in (("a", 4.0), ("b", 5.0)):
        dataset = Dataset.create(tmp_path / name, TARGET, {})
        row = TuningRecord(TRAINING[0], config, "key", Measurement("ok", us))
        dataset.append_measurements([row], run=RunInfo(name, name, "", "", name))
    merged = merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    assert merged.recorded(TRAINING[0])[config].latency_us == 4.0


# --- Plans and budgets ----------------------------------------------------------------------------


def test_a_plan_says_what_it_takes_and_runs_nothing(recording: Path, tmp_path: Path) -> None:
    done = command("--plan", "--replay", recording, "--json")
    planned = json.loads(done.stdout)
    assert planned["rows"] == sum(rows_of(recording).values())
    assert planned["workloads"] == 8
    costs = ("compile_hours", "gpu_minutes", "bytes", "binaries")
    assert min(planned[name] for name in costs) > 0
    half = command("--plan", "--replay", recording, "--part", "1/2", "--json")
    assert json.loads(half.stdout)["workloads"] == 4


def test_a_plan_grows_with_the_work() -> None:
    configs = tuple(GemmConfig("pointer", 16, 16, 16, w, 1) for w in (1, 2, 4))
    small, large = (Job(Workload.dense(m, 4096, 4096), configs) for m in (16, 16384))
    one, two, slow = (plan(jobs, TARGET) for jobs in ([small], [small, small], [large]))
    assert (one["rows"], one["binaries"], two["rows"]) == (4, 3, 8)
    assert two["gpu_minutes"] == pytest.approx(2 * one["gpu_minutes"])
    assert slow["gpu_minutes"] > 2 * one["gpu_minutes"]


@pytest.mark.slow
@pytest.mark.fault("B61")
def test_a_budget_is_kept_and_a_later_run_goes_on(
    recording: Path, whole: Path, tmp_path: Path
) -> None:
    folder, start = tmp_path / "data", time.monotonic()
    done = command("--replay", recording, "--out", folder, "--budget", "0s")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    assert not rows_of(folder)
    assert "the budget ended in the preparation" in done.stderr
    done = command("--replay", recording, "--out", folder, "--budget", "2h")
    assert done.returncode == 0, done.stderr
    assert rows_of(folder) == rows_of(whole)
    assert "budget" not in done.stderr
    again = command("--replay", recording, "--out", folder, "--budget", "0s")
    assert "0 rows more" in again.stdout
    assert f"holds 8 workloads, {len(Dataset.open(folder).measurements('train', 'eval'))} rows" in (
        again.stdout
    )


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_collection_says_what_it_keeps(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def stop(_: object, job: Job, progress: Progress) -> None:
        if progress.jobs_done == 3:
            raise end

    monkeypatch.setattr("costmodel.cli.live.LiveView.job", stop)
    done = run_here("collect", "--replay", recording, "--out", tmp_path / "data")
    assert done.exit_code
    assert f"{tmp_path / 'data'} keeps 3 workloads" in done.stderr


@pytest.mark.parametrize("text", ["ten", "-1m", "10d", "", "1e9", "nan"])
def test_a_budget_that_is_no_time_is_refused(recording: Path, tmp_path: Path, text: str) -> None:
    done = command("--replay", recording, "--out", tmp_path / "x", f"--budget={text}")
    assert not (tmp_path / "x").exists()
    assert done.returncode == 2
    assert "such as 10m" in done.stderr


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_part_that_is_none_is_refused(recording: Path, tmp_path: Path, text: str) -> None:
    done = command("--replay", recording, "--out", tmp_path / "x", f"--part={text}")
    assert not (tmp_path / "x").exists()
    assert done.returncode == 2
    assert "--part" in done.stderr


def test_without_a_model_each_beginning_is_spread_over_sizes(recording: Path) -> None:
    sizes = [2**i for i in range(3, 14)]
    jobs = [Job(Workload.dense(m, 4096, 4096), recorded_jobs(Dataset.open(recording))[0].configs)
            for m in sizes]  # fmt: skip
    ordered = [job.workload.m for job in by_doubt(jobs, RuleHeuristic(), TARGET)]
    assert sorted(ordered) == sizes
    assert min(ordered[:2]) <= 16
    assert max(ordered[:2]) >= 1024


class Doubts(RuleHeuristic):
    """Has learned nothing of one workload."""

    kind = "learned"

    def out_of_coverage(self, workload: Workload) -> str:
        return "new" if workload == RECORDED else ""


def test_what_a_model_does_not_know_comes_first(recording: Path) -> None:
    jobs = recorded_jobs(Dataset.open(recording))
    ordered = by_doubt(jobs, Doubts(), TARGET)
    assert ordered[0].workload == RECORDED
    assert sorted(map(str, ordered)) == sorted(map(str, jobs))
