"""`costmodel bench all`: what is run, what is left out and why, and what becomes of the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_fakes import FOLDER, H100, ROOT

# A benchmark that multiplies what is in data.json; --fails and --part end it otherwise.
FAKE = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--results", type=pathlib.Path)
for name in ("--budget-s", "--every", "--first"):
    parser.add_argument(name, type=float)
args = parser.parse_args()
data = json.loads((pathlib.Path(__file__).parent / "data.json").read_text())
if data.get("code"):
    print("the reason", file=sys.stderr)
rows = [{"name": n, "us": us} for n, us in data["us"].items()]
rows = rows[int(args.first or 0) :: int(args.every or 1)]
text = json.dumps({"rows": rows, "date": data.get("date", "today")})
(args.results / "fake-h100-sxm.json").write_text(text)
sys.exit(data.get("code", 0))
"""


class Fakes:
    """A folder of one benchmark, and what `bench all` does with it."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module, self.folder, self.entry = module, folder, "gpu = false"
        self.results = folder / "made"
        (folder / "bench_fake.py").write_text(FAKE)
        self.data({"a": 1.0, "b": 2.0})

    def data(self, us: dict[str, float], **more: Any) -> None:
        (self.folder / "data.json").write_text(json.dumps({"us": us, **more}))

    def run(self, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
        entry = f'run = "bench_fake.py"\nwrites = "fake-h100-sxm"\nanswers = "How?"\n{self.entry}'
        (self.folder / "list.toml").write_text(f"[fake]\nminutes = 1\n{entry}\n")
        monkeypatch.setattr(self.module, "HERE", self.folder)
        monkeypatch.setattr(self.module.Target, "current", lambda: H100)
        arguments = ["all", *options, "--results", str(self.results)]
        monkeypatch.setattr(sys, "argv", arguments)
        code: int = self.module.at_exit_code(self.module.main)
        return code

    def shipped(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "fake-h100-sxm.json").read_text())
        return found


@pytest.fixture
def fakes(script: Any, tmp_path: Path) -> Fakes:
    return Fakes(script("reproduce"), tmp_path)


def test_what_is_the_same_leaves_no_difference(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.data({"a": 1.0}, date="long ago")
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    assert "written to fake-h100-sxm.json" in capfd.readouterr().out
    fakes.data({"a": 1.0 + 1e-9}, date="today")
    assert fakes.run(monkeypatch, "--no-gpu", "--again") == 0
    assert "the same figures" in capfd.readouterr().out
    assert fakes.shipped() == {"rows": [{"name": "a", "us": 1.0}], "date": "long ago"}
    fakes.data({"a": 1.1})
    assert fakes.run(monkeypatch, "--no-gpu", "--again") == 0
    assert fakes.shipped()["rows"] == [{"name": "a", "us": 1.1}]


def test_it_goes_on_where_it_stopped(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.data({"a": 1.0}, code=1)
    assert fakes.run(monkeypatch, "--no-gpu") == 1
    assert "failed, exit code 1" in capfd.readouterr().out
    fakes.data({"a": 1.0})
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    assert "written" in capfd.readouterr().out
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    assert "done; --again runs it once more" in capfd.readouterr().out
    monkeypatch.setattr(fakes.module, "sources", lambda: "changed since")
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    assert "the same figures" in capfd.readouterr().out


def test_a_part_is_not_kept(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.entry = "gpu = true"
    fakes.data({"a": 1.0}, code=fakes.module.PART)
    assert fakes.run(monkeypatch) == 1
    assert "stopped by its budget: not kept" in capfd.readouterr().out
    assert list(fakes.results.glob("*.json")) == []


def test_what_does_not_fit_in_the_budget_does_not_start(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fakes.run(monkeypatch, "--no-gpu", "--budget-s", "30") == 0
    assert "takes 1.0 min, and 0.5 are left" in " ".join(capfd.readouterr().out.split())
    assert list(fakes.results.glob("*.json")) == []


@pytest.mark.parametrize("entry", ["gpu = true", "times = true"])
def test_what_would_differ_on_this_machine_is_left_out(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    fakes.entry = entry
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    assert list(fakes.results.glob("*.json")) == []


def test_rows_of_a_package_that_is_missing_are_kept(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.data({"ours": 1.0, "theirs": 2.0})
    assert fakes.run(monkeypatch, "--no-gpu") == 0
    fakes.entry = 'packages = ["no_such_package"]'
    fakes.data({"ours": 1.0})
    assert fakes.run(monkeypatch, "--no-gpu", "--again") == 0
    assert "the same figures, without no_such_package" in capfd.readouterr().out
    fakes.data({"ours": 1.5})
    assert fakes.run(monkeypatch, "--no-gpu", "--again") == 1
    assert "install it, then run again" in capfd.readouterr().err
    assert len(fakes.shipped()["rows"]) == 2


def test_a_share_is_compared_with_what_is_shipped(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.entry = 'gpu = true\nkey = ["name"]\nfigures = ["us"]\nnoise_pct = 5'
    fakes.data({f"row {i}": 10.0 for i in range(40)})
    assert fakes.run(monkeypatch) == 0
    capfd.readouterr()
    fakes.data({f"row {i}": 10.0 + 0.01 * i for i in range(40)})
    assert fakes.run(monkeypatch, "--check", "0.1") == 0
    assert "4 of 4 figures within 5 %" in " ".join(capfd.readouterr().out.split())
    assert fakes.shipped()["rows"][39]["us"] == 10.0, "nothing is written"
    fakes.data({f"row {i}": 11.0 for i in range(40)})
    assert fakes.run(monkeypatch, "--check", "0.1") == 1
    told = capfd.readouterr()
    assert "0 of 4 figures" in " ".join(told.out.split())
    assert told.err.count(", us: 11, was 10\n") == 4, "which ones differ"


def test_the_draw_is_of_the_seed(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def measure(bench: Any, folder: Path, options: list[str]) -> int:
        drawn.append(options)
        return 1

    monkeypatch.setattr(fakes.module, "measure", measure)
    fakes.entry = 'gpu = true\nkey = ["name"]\nfigures = ["us"]\nnoise_pct = 5'
    for seed in ("0", "0", "1", "2"):
        assert fakes.run(monkeypatch, "--check", "0.1", "--seed", seed) == 1
    assert drawn[0] == drawn[1]
    assert len({tuple(options) for options in drawn}) > 1
    assert all(options[2:4] == ["--every", "10"] for options in drawn)


def test_wrong_options_are_told(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fakes.run(monkeypatch, "--only", "nothing") == 1
    assert "no benchmark nothing: expected some of fake" in capfd.readouterr().err
    for options in (("--check", "2"), ("--check", "0.1", "--no-gpu")):
        with pytest.raises(SystemExit):
            fakes.run(monkeypatch, *options)
        assert options[0] in capfd.readouterr().err


def test_the_list_describes_what_is_there(script: Any) -> None:
    listed = script("reproduce").read_list()
    shipped = {path.name for path in (FOLDER / "results").glob("*.json")}
    for bench in listed:
        assert (FOLDER / bench.run.split()[0]).is_file()
        assert bool(bench.figures) == bool(bench.key) == bool(bench.noise_pct)
        assert not bench.key or bench.gpu, "without a GPU every figure is compared"
        assert bench.minutes > 0
        assert bench.answers.endswith(("?", "."))
        if bench.writes and "{target}" not in bench.writes:
            assert f"{bench.writes}.json" in shipped
    writes = {bench.writes.partition("-{")[0] for bench in listed}
    made = {name.removesuffix(".json") for name in shipped}
    of_gpu = {name.removesuffix("-h100-sxm").removesuffix("-h200-sxm") for name in made}
    assert {n for n in of_gpu if n not in writes and not any(m.startswith(n) for m in writes)} <= {
        "tuning_cost-4-workers"
    }


@pytest.mark.parametrize("name", ["kernels", "buckets", "tuning_cost", "lowprecision", "dispatch"])
def test_shipped_rows_have_what_is_compared(script: Any, name: str) -> None:
    module = script("reproduce")
    bench = next(b for b in module.read_list() if b.name == name)
    path = ROOT / "benchmarks" / "results" / f"{bench.writes.format(target='h200-sxm')}.json"
    rows = json.loads(path.read_text())["rows"]
    found = module.deviations_pct(bench, rows, rows)
    assert len(found) > len(rows) / 2
    assert max(found) == 0
    assert len({tuple(str(row.get(column)) for column in bench.key) for row in rows}) == len(rows)
