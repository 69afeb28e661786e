"""What a newcomer does wrong: it is told before the work, in words, and destroys nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_recording import RECORDED, TARGET, write_recording
from test_cache import KEY, RESULT
from test_cli import run, run_json

import costmodel
from costmodel.cli.draw import read_shapes
from costmodel.data.dataset import Dataset
from costmodel.data.shards import require_place, write_file
from costmodel.errors import CorruptFile, FileError, InvalidInput, NoGpu
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import MOST, Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import XgbCostModel
from costmodel.reports.html_report import write_html
from costmodel.tuning.ranking import rank
from costmodel.tuning.winner_cache import WinnerCache

SIZES = (RECORDED.m, RECORDED.n, RECORDED.k)
HERE = ("--target", "h100-sxm")
KERNELS = Path(__file__).parents[1] / "datasets" / "kernels-h200-sxm"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("faults") / "data").path


@pytest.fixture(scope="module")
def model(source: Path) -> XgbCostModel:
    return costmodel.train(source, calibrated=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "data").path


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began before its place was looked at")

    monkeypatch.setattr(costmodel, "train", never)
    monkeypatch.setattr("costmodel.autotune.model.KernelModel.train", never)
    monkeypatch.setattr("costmodel.collect.sampling.training_workloads", never)
    monkeypatch.setattr("costmodel.reports.html_report.html_report", never)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(*arguments: object) -> str:
    """The one line that a command ends with."""
    result = run(*arguments)
    assert result.exit_code == 2, result.stderr
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("error: "))
    assert "Errno" not in line
    assert ".tmp" not in line
    return line


# --- What would be destroyed -------------------------------------------------------------------


def card_of(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "card.json").write_text(text)

    return make


def a_dataset_without_its_card(folder: Path) -> None:
    write_recording(folder)
    (folder / "card.json").unlink()


NO_MODELS: dict[str, Callable[[Path], Any]] = {
    "dataset": write_recording, "without card": a_dataset_without_its_card,
    "foreign": card_of('{"format": 1, "name": "a business card"}'), "list": card_of("[1]"),
    "torn": card_of('{"format": 1, "ha'), "binary": card_of("\0"),
    "folder": lambda folder: (folder / "card.json").mkdir(parents=True),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_MODELS)
def test_a_model_replaces_nothing_but_a_model(
    data: Path, tmp_path: Path, untrained: None, model: XgbCostModel, what: str
) -> None:
    out = tmp_path / "out"
    NO_MODELS[what](out)
    before = content(out)
    for datasets in ((data,), (data, data)):
        assert str(out) in refused("train", *datasets, "--out", out)
    with pytest.raises(FileError, match="another folder"):
        model.save(out)
    assert content(out) == before


def test_a_model_does_not_replace_what_it_is_trained_on(data: Path, untrained: None) -> None:
    before = content(data)
    for datasets in ((data,), (data, data)):
        assert "holds a dataset" in refused("train", *datasets, "--out", data)
    (data.parent / "link").symlink_to(data)
    assert "holds a dataset" in refused("train", data, "--out", data.parent / "link")
    assert content(data) == before
    assert len(Dataset.open(data).workloads("train")) == 6


def test_a_model_may_replace_a_model(data: Path, tmp_path: Path, model: XgbCostModel) -> None:
    out = tmp_path / "new" / "model"
    model.save(out)
    card = json.loads((out / "card.json").read_text())
    for change in ({}, {"feature_schema": 0}, {"format": 99}, {"hash": "of other trees"}):
        (out / "card.json").write_text(json.dumps(card | change))
        model.save(out)
        assert costmodel.load(out).hash == model.hash
    (out / "card.json").unlink()
    for table in out.glob("artifacts*.parquet"):  # as a crash before the card leaves it
        table.unlink()
    model.save(out)
    assert run_json("train", data, "--out", out)["path"] == str(out)


def test_a_dataset_goes_into_no_model(tmp_path: Path, untrained: None, model: XgbCostModel) -> None:
    saved = model.save(tmp_path / "model")
    foreign = tmp_path / "foreign"
    card_of("{}")(foreign)
    for folder in (saved, foreign):
        before = content(folder)
        assert str(folder) in refused("collect", "--out", folder)
        with pytest.raises(FileError):
            require_place(folder, "dataset")
        assert content(folder) == before
    with pytest.raises(CorruptFile, match="card of a model"):
        Dataset.create(saved, TARGET, {})
    require_place(tmp_path / "new", "dataset")


def test_a_dataset_goes_on_in_its_own_folder(data: Path) -> None:
    require_place(data, "dataset")


# --- What cannot be written --------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("train", "DATA", "--out"), ("collect", "--out"),
     ("compile", 64, 64, 64, *HERE, "--dump")],
    ids=lambda x: " ".join(map(str, x)),
)  # fmt: skip
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_where_a_folder_is_expected(
    source: Path, tmp_path: Path, untrained: None, arguments: tuple[object, ...], below: str
) -> None:
    file = tmp_path / "README.md"
    file.write_text("mine")
    line = refused(*(source if a == "DATA" else a for a in arguments), file / below)
    assert f"expected a folder, and {file} is a file" in line
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [("train", "DATA", "--out"), ("train", "KERNELS", "--out"), ("collect", "--out"),
     ("collect", "--replay", "DATA", "--out"), ("collect", "--merge", "DATA", "--out"),
     ("collect", "--write-worklist"), ("report", "--data", "DATA", "--html"),
     ("compile", 64, 64, 64, *HERE, "--dump"), ("compile", 64, 64, 64, *HERE, "--bundle"),
     ("kernels", "record")],
    ids=lambda x: " ".join(map(str, x)),
)  # fmt: skip
@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", f"{'x' * 300}", "FOLDER"])
def test_what_cannot_be_written_is_told_before_the_work(
    source: Path, tmp_path: Path, untrained: None, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...], place: str,
) -> None:  # fmt: skip
    """Also where the folder is there and takes no files, as a full or read-only disk."""
    monkeypatch.chdir(tmp_path)
    folders: dict[object, Path] = {"DATA": source, "KERNELS": KERNELS}
    out = {"FOLDER": "/proc/self/fdinfo"}.get(place, place)
    line = refused(*(folders.get(a, a) for a in arguments), out)
    assert out in line
    assert re.search(r"check that|make it|expected the name", line)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [("collect", "--out", "x", "--replay"), ("collect", "--out", "x", "--merge"),
     ("collect", "--plan", "--replay"), ("report", "--data"), ("evaluate", "--data"),
     ("tune", 64, 64, 64, "--data")],
    ids=lambda x: " ".join(map(str, x)),
)  # fmt: skip
def test_a_dataset_of_kernels_is_none_of_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{KERNELS} is a dataset of kernels" in refused(*arguments, KERNELS)
    assert os.listdir(tmp_path) == []


def test_each_kind_of_dataset_is_trained_alone(
    source: Path, tmp_path: Path, untrained: None
) -> None:
    for given in ((source, KERNELS), (KERNELS, source), (source, source, KERNELS)):
        line = refused("train", *given, "--out", tmp_path / "x")
        assert "products and of kernels" in line
        assert "alone" in line


def test_without_a_gpu_it_is_told_what_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = refused("collect", "--out", tmp_path / "x")
    assert "collect --plan" in line
    assert "collect --replay DIR" in line
    assert run("collect", "--plan", "--workloads", 1).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [("report", "--data", "DATA", "--html"), ("collect", "--write-worklist")],
    ids=lambda x: " ".join(map(str, x)),
)
def test_a_file_in_a_folder_that_is_not_there(
    source: Path, tmp_path: Path, untrained: None, arguments: tuple[object, ...]
) -> None:
    command = [source if a == "DATA" else a for a in arguments]
    missing = tmp_path / "nowhere"
    assert f"there is no folder {missing}: make it" in refused(*command, missing / "x")
    (tmp_path / "file").touch()
    assert "there is no folder" in refused(*command, tmp_path / "file" / "x")
    assert "is a folder: expected the name of a file" in refused(*command, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_the_library_says_the_same(tmp_path: Path, source: Path, model: XgbCostModel) -> None:
    missing = tmp_path / "nowhere" / "x"
    for write in (
        lambda: write_html(missing, Dataset.open(source), model),
        lambda: write_file(missing, b""),
    ):
        with pytest.raises(FileError, match="there is no folder"):
            write()
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="expected a folder"):
        require_place(tmp_path / "file", "model")


def test_what_the_system_refuses_is_told_without_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr("costmodel.tuning.ranking.rank", full)
    assert "/data/x: No space left on device: check" in refused("rank", *SIZES, *HERE)


@pytest.mark.fault("B22")
@pytest.mark.parametrize("command", ["list", "verify", "clear"])
@pytest.mark.parametrize("group", ["cache", "kernels"])
def test_a_cache_that_is_no_folder_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, group: str
) -> None:
    file = tmp_path / "cache"
    file.write_text("mine")
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(file))
    line = refused(group, command)
    assert f"{file}: expected the folder of winners; COSTMODEL_CACHE_DIR" in line
    assert file.read_text() == "mine"
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "not yet"))
    assert run_json(group)["entries"] == []


# --- Files in the cache that are no winners ----------------------------------------------------


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WinnerCache:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    cache = WinnerCache()
    cache.put(KEY, RESULT)
    for number in range(30):
        (tmp_path / "cache" / f"spoilt-{number:02}.json").write_text("{")
    return cache


@pytest.mark.fault("B13")
def test_what_is_no_winner_is_named(spoilt: WinnerCache) -> None:
    found = json.loads(run("cache", "verify", "--json").stdout)
    assert found["unusable"] == 30
    assert found["unusable_files"] == [f"spoilt-{number:02}.json" for number in range(20)]
    people = run("cache", "verify")
    assert people.exit_code == 1
    assert "spoilt-00.json, spoilt-01.json" in people.stderr
    assert "and 10 more" in people.stderr


@pytest.mark.parametrize(
    "command",
    [("list",), ("show", KEY["name"]), ("verify",), ("clear", "--yes")],
    ids=" ".join,
)
def test_json_may_be_asked_of_the_group(spoilt: WinnerCache, command: tuple[str, ...]) -> None:
    assert json.loads(run("cache", "--json", *command).stdout)


def test_as_many_are_removed_as_were_listed(spoilt: WinnerCache) -> None:
    listed = len(run_json("cache", "list")["entries"])
    people = run("cache", "clear", "--yes")
    assert listed == 1
    assert f"{listed} winners removed" in people.stderr
    assert "and 30 files that were no entries" in people.stderr
    assert spoilt.path is not None
    assert list(spoilt.path.glob("*.json")) == []
    spoilt.put(KEY, RESULT)
    assert spoilt.clear() == (1, 0)
    assert run_json("cache", "clear", "--yes") == {
        "path": str(spoilt.path),
        "removed": 0,
        "unusable": 0,
    }


# --- What is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 2**31 - 1, 10**30])
def test_sizes_are_over_0_and_fit(place: int, size: int) -> None:
    sizes = [64, 64, 64]
    sizes[place] = size
    line = refused("rank", *sizes)
    assert f"{'MNK'[place]}={size}: expected a size from 1 to {MOST}" in line
    assert "budget" not in line


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [*((("collect", "--write-worklist", "x", *HERE, *option), option[0])
       for option in (("--model", "x"), ("--best", 0.4), ("--unsure", 0.1), ("--out", "y"),
                      ("--jobs", 2), ("--budget", 9))),
     (("collect", "--out", "x", "--sampler", "random", "--best", 0.5), "--best"),
     (("collect", "--out", "x", "--shapes", "SHAPES", "--workloads", 5), "--workloads"),
     *((("collect", "--out", "x", "--worklist", "y", *option), option[0])
       for option in (("--workloads", 5), ("--shapes", "SHAPES"), ("--dtypes", "float16"),
                      ("--configs", 9), ("--seed", 0), ("--sampler", "random"))),
     (("tune", *SIZES, "--data", "DATA", "--target", "h200-sxm"), "--target")],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None,
    arguments: tuple[object, ...], idle: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("shapes.csv").write_text("m,n,k\n64,64,64\n")
    names = {"DATA": source, "SHAPES": "shapes.csv"}
    line = refused(*(names.get(str(a), a) for a in arguments))
    assert idle in line
    assert sorted(os.listdir()) == ["shapes.csv"]


@pytest.mark.parametrize(
    "options",
    [(), ("--worklist", "y", "--kernel", "z.py:f"), (*SIZES, "--kernel", "z.py:f"),
     ("--kernel", "z.py:f", "--config", "tma 128x256x64 w8 s4 g8")],
    ids=lambda x: " ".join(map(str, x)),
)  # fmt: skip
def test_a_bundle_is_of_one_kind_of_work(options: tuple[object, ...], tmp_path: Path) -> None:
    result = run("compile", *HERE, "--bundle", tmp_path / "x.zip", *options)
    assert result.exit_code == 2
    assert "expected M N K; or --bundle, with --worklist or --kernel" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["rank", "explain", "tune", "compile"])
@pytest.mark.parametrize("text", ["4k", "512x4096x4096", "1.5", "1e3"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_size_that_is_no_number_is_named(command: str, text: str, place: int) -> None:
    result = run(command, *SIZES[:place], text, *SIZES[place + 1 :])
    assert result.exit_code == 2
    assert f"'{text}'" in result.stderr
    assert "M N K apart" in " ".join(re.sub(r"[│╭╰─╮╯]", "", result.stderr).split())


@pytest.mark.parametrize("option", ["--top", "--limit", "--jobs"])
def test_a_number_that_is_none_is_named(option: str) -> None:
    result = run("rank" if option == "--top" else "compile", *SIZES, option, "many")
    assert "'many'" in result.stderr
    assert "apart" not in result.stderr


@pytest.mark.parametrize("option", ["--a-layout", "--b-layout"])
def test_a_layout_is_told_in_the_words_of_the_command_line(option: str) -> None:
    line = refused("rank", *SIZES, *HERE, option, "column")
    assert "'column': expected row or col" in line
    assert "()" not in line


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("half", "float16"), ("f16", "float16"), ("FP16", "float16"), ("Float16", "float16"),
     ("BF16", "bfloat16"), ("BFloat16", "bfloat16"), ("float", "float32"), ("FP32", "float32")],
)  # fmt: skip
def test_types_have_other_names_in_any_case(text: str, dtype: str) -> None:
    found = run_json("rank", *SIZES, *HERE, "--dtype", text, "--top", 1)
    assert found["workload"] == run_json(
        "rank", *SIZES, *HERE, "--dtype", dtype, "--top", 1
    )["workload"]  # fmt: skip
    plan = ("collect", "--plan", "--workloads", 1, "--configs", 1, "--dtypes")
    assert run_json(*plan, f"{text},BF16") == run_json(*plan, f"{dtype},bfloat16")


@pytest.mark.parametrize("text", ["fp8", "int8", "float8_e4m3fn", "INT8"])
def test_narrow_types_are_sent_to_scaled_mm(text: str) -> None:
    assert "costmodel.scaled_mm" in refused("rank", *SIZES, *HERE, "--dtype", text)
    assert "costmodel.scaled_mm" in refused("collect", "--plan", "--dtypes", text)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["table", "json"])
def test_an_output_that_is_full_is_told(as_json: tuple[str, ...], unbuffered: str) -> None:
    command = [sys.executable, "-m", "costmodel", "rank", *map(str, SIZES), *HERE, *as_json]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ
        )  # fmt: skip
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not line.startswith("... rank")]
    assert len(told) == 1
    assert told[0].startswith("error: the output could not be written: No space left")


def test_a_plan_has_the_units_of_people() -> None:
    options = ("collect", "--plan", "--workloads", 40, *HERE)
    planned, table = run_json(*options), run(*options).stdout
    assert all(isinstance(planned[x], float) for x in ("compile_hours", "gpu_minutes"))
    assert re.search(r"compile .* \d+ min", table)
    assert f"{planned['bytes'] / 1e6:.2g} MB" in table
    assert str(planned["bytes"]) not in table


def test_a_target_beside_a_gpu_is_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(*_: Any, **__: Any) -> Any:
        raise NoGpu("tuned on the one here")

    here = Target.named("h200-sxm", Toolchain("3.6.0", "12.8"))
    monkeypatch.setattr("costmodel.hardware.target.Target.current", lambda *_: here)
    monkeypatch.setattr(costmodel, "tune", tune)
    assert "name --replay too" in refused("tune", *SIZES, "--target", "h100-sxm")
    assert "tuned on the one here" in refused("tune", *SIZES, "--target", "h200-sxm")


@pytest.mark.fault("B11")
@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--shapes", "nowhere.csv"), "no file nowhere.csv"), (("--dtypes", "fp8"), "fp8"),
     (("--worklist", "nowhere"), "no file nowhere"),
     (("--sampler", "model", "--model", "nowhere"), "no model at")],
)  # fmt: skip
def test_what_is_collected_is_checked_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: str
) -> None:
    def none(*_: Any) -> Any:
        raise NoGpu("there is none")

    monkeypatch.setattr("costmodel.hardware.target.Target.current", none)
    monkeypatch.chdir(tmp_path)
    assert expected in refused("collect", "--out", "data", *options)
    assert "there is none" in refused("collect", "--out", "data")


@pytest.mark.parametrize("shapes", [False, True])
def test_every_kind_that_collect_takes_is_offered(tmp_path: Path, shapes: bool) -> None:
    (tmp_path / "shapes.csv").write_text("m,n,k\n64,64,64\n")
    options = ("--shapes", tmp_path / "shapes.csv") if shapes else ()
    command = ("collect", "--write-worklist", tmp_path / "list", *HERE, *options)
    for wrong in ("fp8", "", "float16,fp8", "float17"):
        line = refused(*command, "--dtypes", wrong)
        assert "float16, bfloat16, float32, tf32" in line


# --- A file of shapes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("m,n\n1,2\n", "line 1", "no column k"),
        ("a,b\n1,2\n", "line 1", "no column m, n, k"),
        ("", "line 1", "no column"),
        ("1,2,3\n", "line 1", "expected m, n and k by name"),
        ("name,m,n,k\na,1,2,3\nb,1,x,3\n", "line 3", "n='x'"),
        ("m,n,k\n1,2\n", "line 2", "k=''"),
        ("m,n,k\n1,2,\n", "line 2", "k=''"),
        ("m,n,k\n1,2,0\n", "line 2", "k='0'"),
        ("m,n,k\n1,-2,3\n", "line 2", "n='-2'"),
        ("m,n,k\n1,2,3.5\n", "line 2", "k='3.5'"),
        ("m,n,k\n1,2,1e3\n", "line 2", "k='1e3'"),
        ("m,n,k\n1,2,2147483648\n", "line 2", "k='2147483648'"),
        (f"m,n,k\n1,2,{'9' * 5000}\n", "line 2", "k='999"),
        ("m,n,k\n1,2,\u0663\n", "line 2", "k="),
        ("m,n,k\n1,2,3\n1;2;3\n", "line 3", "m='1;2;3'"),
        (f'm,n,k\n1,2,"{"x" * 200_000}"\n', "line 2", "field larger"),
        ("m,n,k\n", "", "no row"),
    ],
)
def test_the_line_of_a_wrong_shape_is_named(
    tmp_path: Path, text: str, where: str, expected: str
) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput) as told:
        read_shapes(path)
    message = str(told.value)
    assert message.startswith(str(path))
    assert where in message
    assert expected in message
    assert "Error(" not in message
    assert len(message) < 400
    line = refused("collect", "--shapes", path, "--write-worklist", tmp_path / "x", *HERE)
    assert expected in line


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_bytes(b"m,n,k\n\xff,2,3\n")
    with pytest.raises(InvalidInput, match="UTF-8"):
        read_shapes(path)
    path.write_bytes(b"\xef\xbb\xbfm,n,k\n 1 ,2,3\n")  # as spreadsheets write it
    assert read_shapes(path) == [(1, 2, 3)]


# --- What is said ------------------------------------------------------------------------------


@pytest.mark.fault("B66")
@pytest.mark.parametrize("command", ["rank", "explain"])
@pytest.mark.parametrize("sizes", [(64, 4096, 200_000), (64, 4097, 20_001)])
def test_on_request_a_line_for_each_configuration_that_is_skipped(
    command: str, sizes: tuple[int, int, int]
) -> None:
    ranking = rank(Workload.dense(*sizes), TARGET)
    rejected = SearchSpace.of(ranking.workload, TARGET).rejected
    loud = run("-v", command, *sizes, *HERE, "--json")
    quiet = run(command, *sizes, *HERE, "--json")
    lines = loud.stderr.splitlines()
    assert len(lines) - len(quiet.stderr.splitlines()) == len(rejected) + ranking.failed
    assert json.loads(loud.stdout) == json.loads(quiet.stdout)
    assert all(len(line) <= 400 for line in lines)
    for config, reason in list(rejected.items())[::100]:
        assert f"{config}: {reason}" in lines


@pytest.mark.fault("B66")
def test_what_is_known_not_to_compile_is_told_too() -> None:
    sizes = (64, 4096, 200_000)
    ranking = rank(Workload.dense(*sizes), TARGET)
    assert ranking.failed > 0, "of the shipped artifacts"
    told = run("-v", "rank", *sizes, *HERE, "--json").stderr.splitlines()[-ranking.failed :]
    assert all("compile_error" in line or "shared memory" in line for line in told), told
