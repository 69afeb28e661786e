"""``costmodel collect --counters``: what Nsight Compute counts is kept beside the PTX features.

A program of that name stands for it: it prints what ncu prints for ``--csv --page raw``.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_recording import TARGET, record, write_recording
from typer.testing import CliRunner

from costmodel.cli import app
from costmodel.collect import best_recorded, machine
from costmodel.collect.counters import launch_each, record_counters
from costmodel.collect.parts import recorded_jobs
from costmodel.collect.sampling import write_worklist
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity
from costmodel.errors import MissingData
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.problem import GemmProblem
from costmodel.measure.protocol import TimingProtocol

HEAD = '''==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "gemm_tma" - 0: 0%....50%....100% - 8 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","gpu__time_duration.sum",\
"lts__t_sector_hit_rate.pct","device__attribute_chip"
"","","","","","","","","","","","byte","ns","%",""'''
ROW = (
    '"{0}","4242","python3.11","127.0.0.1","gemm_tma","1","7","(384, 1, 1)","(132, 1, 1)","0",'
    '"9.0","67,174,40{0}","21,{0}12","n/a","384"'
)
DENIED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0."
)


@pytest.fixture
def recording(tmp_path: Path) -> Dataset:
    return write_recording(tmp_path / "recording")


def lines_of(dataset: Dataset, rows: int | None = None) -> str:
    """Return what the program and ncu print: of so many rows, or all."""
    best = best_recorded(dataset)
    told = [json.dumps({"workload": job.workload.key(), "ptx": 1.0}) for job in best]
    return "\n".join([*told, HEAD, *(ROW.format(i) for i, _ in enumerate(told[:rows]))])


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a program ``ncu`` in PATH, which prints a text and fails or not.

    It writes its arguments to a file beside it.
    """

    def install(text: str, code: int = 0) -> Path:
        (folder := tmp_path / "bin").mkdir(exist_ok=True)
        file = folder / "ncu"
        file.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"open(__file__ + '.json', 'w').write(json.dumps(sys.argv[1:]))\n"
            f"print({text!r})\nsys.exit({code})\n"
        )
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return folder / "ncu.json"

    return install


def test_counters_stand_beside_what_the_program_tells(recording: Dataset, ncu: Any) -> None:
    arguments = ncu(lines_of(recording))
    record_counters(recording.path)
    found = json.loads((recording.path / "counters.json").read_text())
    assert len(found) == len(best_recorded(recording)) >= 2
    assert [row["workload"] for row in found] == [
        j.workload.key() for j in best_recorded(recording)
    ]
    assert {row["ptx"] for row in found} == {1.0}
    assert [row["dram__bytes_read.sum"] for row in found][:2] == [67174400.0, 67174401.0]
    assert [row["gpu__time_duration.sum"] for row in found][:2] == [21012.0, 21112.0]
    assert all("lts__t_sector_hit_rate.pct" not in row for row in found), "it was not counted"
    assert all("device__attribute_chip" not in row for row in found), "it was not asked for"
    given = json.loads(arguments.read_text())
    options = dict(pairwise(given))
    assert options["--page"] == "raw"
    assert options["--print-units"] == "base"
    assert options["--kernel-name"] == "regex:^gemm_"
    assert "dram__bytes_read.sum" in options["--metrics"].split(",")
    assert given[-4:] == [sys.executable, "-m", "costmodel.collect.counters", str(recording.path)]
    assert len(Dataset.open(recording.path).measurements()) == len(recording.measurements())


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [(DENIED, 1, "ERR_NVGPUCTRPERM"), ("Traceback\nNoGpu: no usable GPU", 1, "no usable GPU"),
     ("", 0, "0 of 0"), ("==PROF== nothing was profiled", 0, "nothing was profiled")],
)  # fmt: skip
def test_what_ncu_does_not_count_is_one_error(
    recording: Dataset, ncu: Any, text: str, code: int, told: str
) -> None:
    ncu(text, code)
    with pytest.raises(MissingData, match=told) as error:
        record_counters(recording.path)
    assert "\n" not in str(error.value)
    assert not (recording.path / "counters.json").exists()


def test_counters_of_fewer_rows_are_not_given_to_others(recording: Dataset, ncu: Any) -> None:
    ncu(lines_of(recording, rows=1))
    count = len(best_recorded(recording))
    with pytest.raises(MissingData, match=f"counted 1 of {count} rows"):
        record_counters(recording.path)


def test_the_program_launches_the_best_once_and_tells_of_it(
    recording: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = []
    randn = torch.randn

    def launcher(problem: GemmProblem, config: Any, *_: Any) -> Any:
        return lambda operands: launched.append((problem.workload, config, len(operands)))

    monkeypatch.setattr(GemmProblem, "launcher", launcher)
    monkeypatch.setattr(torch, "randn", lambda n, dtype, device: randn(n).to(dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launch_each(recording)
    best = best_recorded(recording)
    assert launched == [(job.workload, job.configs[0], 4) for job in best]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["latency_us"] for row in told] == [*best.values()]
    assert all(set(PTX_FEATURES) < set(row) for row in told)
    for job, us in best.items():
        assert us == min(m.latency_us for m in recording.recorded(job.workload).values() if m.ok)


def test_without_ncu_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["collect", "--counters", "--out", str(tmp_path / "data")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --counters: there is no program ncu in PATH")
    assert "install Nsight Compute" in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "options",
    [("--engine", "ray"), ("--replay", "DIR"), ("--bundle", "x.zip", "--kernel", "k.py:call"),
     ("--write-worklist", "x"), ("--plan",), ("--merge", "DIR")],
)  # fmt: skip
def test_counters_where_nothing_is_counted_are_refused(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["collect", "--counters", "--out", "x", *options])
    assert result.exit_code == 2
    assert "leave out" in result.stderr
    assert "--counters" in result.stderr


def test_the_command_counts_what_it_has_timed(
    ncu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording times in place of a GPU."""
    protocol = TimingProtocol().to_dict()
    recording = write_recording(tmp_path / "recording", protocol=protocol)
    file, out, timer = tmp_path / "work.parquet", tmp_path / "out", machine.Timer
    write_worklist(file, recorded_jobs(recording), Identity(TARGET, protocol))
    monkeypatch.setattr(Target, "current", lambda index=None: TARGET)
    monkeypatch.setattr(machine, "Timer", lambda *_: timer(recording))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ncu(lines_of(recording))
    arguments = ["collect", "--worklist", str(file), "--out", str(out), "--counters"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert len(Dataset.open(out).workloads()) == len(recording.workloads())
    rows = json.loads((out / "counters.json").read_text())
    best = best_recorded(recording)
    assert [row["workload"] for row in rows] == [job.workload.key() for job in best]


def test_a_dataset_of_small_products_alone_has_nothing_to_count(ncu: Any, tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "data", TARGET, {})
    record(dataset, Workload.dense(16, 640, 640), "train", 5)
    assert best_recorded(dataset) == {}
    ncu(HEAD)
    with pytest.raises(MissingData, match="0 of 0"):
        record_counters(dataset.path)
