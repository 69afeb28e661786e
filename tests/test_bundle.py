"""Bundles: compiled here, timed elsewhere; what is not as it was made is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from autotune_fakes import machine_without_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_recording import TARGET, write_recording
from test_collect_parts import command, rows_of

from costmodel.autotune import bundle as bundles
from costmodel.autotune.bundle import collect_kernels, merge_kernels, write_kernel_bundle
from costmodel.autotune.options import Options
from costmodel.autotune.store import KernelStore
from costmodel.collect import Job
from costmodel.collect.bundle import require_usable, unpack, write_bundle
from costmodel.collect.parts import recorded_jobs
from costmodel.collect.sampling import read_worklist
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity
from costmodel.errors import CorruptFile, InvalidInput, MissingData, MixedData
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import source, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain

JOB = Job(
    Workload.dense(64, 256, 256),
    tuple(GemmConfig("pointer", 16, n, 32, 4, 2) for n in (32, 64)),
)
REFUSED = GemmConfig("pointer", 64, 64, 16, 4, 2, maxnreg=24)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_recording(tmp_path_factory.mktemp("recorded") / "data")


@pytest.fixture(scope="module")
def bundle(recording: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work without binaries, to be replayed."""
    file = tmp_path_factory.mktemp("bundle") / "work.zip"
    known = recording.artifacts()
    write_bundle(file, recorded_jobs(recording), TARGET, dict(recording.protocol), known=known)
    return file


def test_a_bundle_is_timed_as_its_work_is_here(
    recording: Dataset, bundle: Path, tmp_path: Path
) -> None:
    for part in ("1/2", "2/2"):
        done = command("--bundle", bundle, "--replay", recording.path, "--part", part,
                       "--out", tmp_path / "data")  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "data") == rows_of(recording.path)
    assert len(Dataset.open(tmp_path / "data").artifacts()) == len(recording.artifacts())


@pytest.mark.slow
def test_binaries_of_a_bundle_are_found_by_triton_in_another_folder(tmp_path: Path) -> None:
    """Whatever the folder was in which they were made; nothing is compiled again."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    target, file = Target.named("h100-sxm"), tmp_path / "work.zip"
    job = Job(JOB.workload, (*JOB.configs, REFUSED))
    planned = write_bundle(file, [job], target, {}, n_jobs=2, dump=tmp_path / "dump")
    assert planned["rows"] == 4
    folder = tmp_path / "elsewhere"
    unpack(file, folder)
    assert read_worklist(folder / "worklist.parquet", Identity(target, {})) == [job]
    artifacts = dict(Dataset.open(folder / "data").artifacts())
    assert sorted(a.status for a in artifacts.values()) == ["compile_error", "ok", "ok"]
    kinds = {path.suffix for path in (folder / "dump").iterdir()}
    assert kinds == {".ptx", ".sass", ".json"}
    before = sorted((folder / "cache").rglob("*"))
    compiled = [path for path in before if path.suffix == ".cubin"]
    assert len(compiled) == 2
    with knobs.cache.scope():
        knobs.cache.dir = str(folder / "cache")
        for config in job.configs[:2]:
            made, options = source(specialize(job.workload, config))
            kernel = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
            assert kernel.asm["cubin"] in [path.read_bytes() for path in compiled]
    assert sorted((folder / "cache").rglob("*")) == before


# --- What is refused ------------------------------------------------------------------------------


def changed(bundle: Path, file: Path, change: Any) -> Path:
    """Write a copy whose files, a dictionary, were changed."""
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file


def listed(files: dict[str, bytes], name: str, content: bytes) -> None:
    """Put in a file that the manifest knows."""
    manifest = json.loads(files["bundle.json"])
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    files |= {"bundle.json": json.dumps(manifest).encode(), name: content}


def of_another_release(files: dict[str, bytes]) -> None:
    files["bundle.json"] = files["bundle.json"].replace(b'"bundle": 1', b'"bundle": 2')


CHANGES: dict[str, tuple[Any, str]] = {
    "outside": (lambda files: listed(files, "../../evil.py", b"x"), "leads out"),
    "absolute": (lambda files: listed(files, "/tmp/costmodel-evil", b"x"), "leads out"),
    "hash": (lambda files: files.update({"worklist.parquet": b"PAR1"}), "hash"),
    "unlisted": (lambda files: files.update(more=b"x"), "more"),
    "lacking": (lambda files: files.pop("worklist.parquet"), "worklist.parquet"),
    "no manifest": (lambda files: files.pop("bundle.json"), "bundle.json"),
    "no JSON": (lambda files: files.update({"bundle.json": b"["}), "JSON"),
    "a list": (lambda files: files.update({"bundle.json": b"[]"}), "expected"),
    "release": (of_another_release, "bundle"),
}


@pytest.mark.fault("B53")
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_refused_and_leaves_nothing_outside(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    change, why = CHANGES[name]
    file = changed(bundle, tmp_path / "changed.zip", change)
    with pytest.raises(CorruptFile, match=f"changed.zip.*{why}.*make it again"):
        unpack(file, tmp_path / "deep" / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"changed.zip", "deep"}
    assert not Path("/tmp/costmodel-evil").exists()


@given(at=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_damage_is_one_error_or_none(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, at: int, bits: int, cut: int
) -> None:
    content, folder = bytearray(bundle.read_bytes()), tmp_path_factory.mktemp("damaged")
    content[at % len(content)] ^= bits
    file = folder / "damaged.zip"
    file.write_bytes(content if cut % 2 else content[: cut % len(content)])
    good = folder / "good"
    unpack(bundle, good)
    try:
        unpack(file, folder / "out")
    except CorruptFile:
        return
    for path in good.rglob("*"):  # what was damaged says nothing, such as a date
        found = folder / "out" / path.relative_to(good)
        assert path.is_dir() or path.read_bytes() == found.read_bytes()


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_bundle_are_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("bytes") / "x.zip"
    file.write_bytes(content)
    with pytest.raises(CorruptFile):
        unpack(file, file.parent / "out")


def test_a_bundle_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="costmodel compile --bundle"):
        unpack(tmp_path / "none.zip", tmp_path)


@pytest.mark.parametrize(
    ("here", "driver_cuda", "why"),
    [(Target.named("a100-sxm", TARGET.toolchain), 12080, "sm_90.*this machine has .*sm_80"),
     (Target(TARGET.device, Toolchain("3.5.0", "12.8")), 12080, "3.6.0.*3.5.0"),
     (Target(TARGET.device, Toolchain("3.6.0", "12.8 DISABLE_PTXAS_OPT=1")), 12080, "DISABLE_PTX"),
     (TARGET, 11080, r", 12\).*, 11\)"), (TARGET, 0, r", 12\).*, 0\)")],
)  # fmt: skip
def test_another_machine_than_it_was_made_for_is_refused(
    here: Target, driver_cuda: int, why: str
) -> None:
    with pytest.raises(MixedData, match=why):
        require_usable(Path("x.zip"), TARGET, here, driver_cuda)


@pytest.mark.parametrize("driver_cuda", [12000, 12080, 13000])
def test_a_driver_of_the_same_or_a_later_cuda_will_do(driver_cuda: int) -> None:
    require_usable(Path("x.zip"), TARGET, TARGET, driver_cuda)


# --- Users' kernels -------------------------------------------------------------------------------

SCRIPT = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128, 256)], key=["n"])
@triton.jit
def twice(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

def call():
    twice[lambda m: (triton.cdiv(1000, m["BLOCK"]),)](torch.zeros(1000), 1000)

def calls():
    for n in (1000, 2000, 1000, 3000):
        twice[lambda m: (triton.cdiv(n, m["BLOCK"]),)](torch.zeros(n), n)

def nothing():
    pass

def once(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)

plain = triton.jit(once)
filled_in = triton.heuristics({"BLOCK": lambda named: 64})(plain)
no_power = triton.autotune([triton.Config({"BLOCK": b}) for b in (63, 127)], key=["n"])(plain)
one_right = triton.autotune([triton.Config({"BLOCK": b}) for b in (63, 64)], key=["n"])(plain)

def beside():
    x = torch.zeros(1000)
    plain[(1,)](x, 1000, BLOCK=64)
    filled_in[lambda m: (triton.cdiv(1000, m["BLOCK"]),)](x, 1000)
    call()
    plain[(2,)](x, 1000, BLOCK=64, num_warps=8)

def wrong(): no_power[(1,)](torch.zeros(9), 9)

def half_wrong(): one_right[(1,)](torch.zeros(9), 9)

def adds(): return 1 + "a"

def too_few(): twice[(1,)](torch.zeros(9))

def too_many(): twice[(1,)](torch.zeros(9), 9, 9, 9)

def gpu(): return torch.zeros(9, device="cuda:77")

def deep(): return adds()
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    file = tmp_path / "my_kernel.py"
    file.write_text(SCRIPT)
    return f"{file}:call"


@pytest.mark.slow
def test_a_users_kernel_is_compiled_here_and_timed_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    planned = write_kernel_bundle(tmp_path / "k.zip", place, Target.named("h100-sxm"), work)
    assert planned == {"calls": 1, "binaries": 3, "failed": 0}
    there, out = tmp_path / "there", tmp_path / "timings"
    unpack(tmp_path / "k.zip", there)
    assert len([*(there / "cache").rglob("*.cubin")]) == 3
    assert not [*there.rglob("*.py")], "no code comes with it"
    # A child process needs a GPU: the machine of the tests times in this one.
    monkeypatch.setattr(bundles, "Options", lambda **_: Options())
    with machine_without_gpu(out) as machine:
        collect_kernels(place, there, out)
        assert machine.timed() == {64, 128, 256}
        assert len(machine.jobs) == 3
        machine.restart()
        collect_kernels(place, there, out)
        assert machine.timed() <= {64}, "only the winner is launched"
    (entry,) = KernelStore(out).entries()
    assert entry.key["name"] == "my_kernel.twice"
    assert {m.status for m in entry.measured.values()} == {"ok"}


def timings(folder: Path) -> dict[int, set[str]]:
    """Return the configurations that were timed, by the kernel's key."""
    return {e.key["key"]["n"]: set(e.measured) for e in KernelStore(folder).entries()}


@pytest.mark.slow
def test_parts_of_a_users_calls_are_joined_to_the_whole(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call is left out of the program: one of another part is launched, and not timed."""
    place = place.replace(":call", ":calls")
    (work := tmp_path / "work").mkdir()
    write_kernel_bundle(tmp_path / "k.zip", place, Target.named("h100-sxm"), work)
    unpack(tmp_path / "k.zip", there := tmp_path / "there")
    monkeypatch.setattr(bundles, "Options", lambda **_: Options())
    parts = [tmp_path / f"part-{i}" for i in (1, 2)]
    for i, out in enumerate(parts):
        with machine_without_gpu(tmp_path / "unused") as machine:
            collect_kernels(place, there, out, i + 1, 2)
            launched = {launch.named["n"] for launch in machine.launches}
        assert launched == {1000, 2000, 3000}
    assert [sorted(timings(out)) for out in parts] == [[1000, 3000], [2000]]
    with machine_without_gpu(tmp_path / "unused"):
        collect_kernels(place, there, tmp_path / "whole")
    merged, found = tmp_path / "all", []
    for _ in range(2):  # again it changes nothing
        assert merge_kernels(merged, *parts) == 3
        assert timings(merged) == timings(tmp_path / "whole")
        found.append({file.name: file.read_text() for file in merged.iterdir()})
    assert found[0] == found[1]


def processes_with_gpus(folder: Path) -> dict[str, str]:
    """Return the environment of processes that believe in their GPUs."""
    (folder / "sitecustomize.py").write_text("import kernel_replay; kernel_replay.stand_in()")
    path = [str(folder), str(Path(__file__).parent), *sys.path]
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.slow
@pytest.mark.fault("B33")
def test_each_gpu_times_its_part_of_a_users_calls(place: str, tmp_path: Path) -> None:
    place = place.replace(":call", ":calls")
    (work := tmp_path / "work").mkdir()
    write_kernel_bundle(tmp_path / "k.zip", place, Target.named("h100-sxm"), work)
    environment = processes_with_gpus(tmp_path)
    options = ("--bundle", tmp_path / "k.zip", "--kernel", place, "--out")
    for name, gpus in (("one", "0"), ("two", "3,GPU-1f0a"), ("four", "0,1,2,3")):
        done = command(*options, tmp_path / name, CUDA_VISIBLE_DEVICES=gpus, **environment)
        assert done.returncode == 0, done.stderr
    assert [len(configs) for configs in timings(tmp_path / "one").values()] == [3, 3, 3]
    for name in ("two", "four"):
        assert timings(tmp_path / name) == timings(tmp_path / "one")
        kept = [sum(file.read_bytes().count(b'"latency_us"') for file in folder.glob("*.jsonl"))
                for folder in (tmp_path / "one", tmp_path / name)]  # fmt: skip
        assert kept[0] == kept[1], "a call is timed by one GPU alone"


@pytest.mark.slow
def test_a_gpu_of_another_kind_is_refused_before_a_users_call_is_made(
    place: str, tmp_path: Path
) -> None:
    (work := tmp_path / "work").mkdir()
    write_kernel_bundle(tmp_path / "k.zip", place, Target.named("a100-sxm"), work)
    options = ("--bundle", tmp_path / "k.zip", "--kernel", place, "--out", tmp_path / "out")
    done = command(*options, CUDA_VISIBLE_DEVICES="0", **processes_with_gpus(tmp_path))
    assert done.returncode == 2
    assert "this machine has" in done.stderr
    assert not timings(tmp_path / "out")


def test_timings_of_kernels_are_merged_by_the_command_and_those_there_are_kept(
    tmp_path: Path,
) -> None:
    for name, text in (("a", "\n1\n2"), ("b", "\n2\n3"), ("all", "\n0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.jsonl").write_text(text)
    done = command("--merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "all", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"] == 1
    assert (tmp_path / "all" / "k.jsonl").read_text().split() == ["0", "1", "2", "3"]


def test_a_kernel_without_its_bundle_is_refused(tmp_path: Path) -> None:
    done = command("--kernel", "my.py:call", "--out", tmp_path / "x")
    assert (done.returncode, "--bundle" in done.stderr) == (2, True)


def test_a_kernel_that_has_changed_is_not_timed_with_old_binaries(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "calls.json").write_text(json.dumps({"source": "0"}))
    with pytest.raises(MixedData, match=r"has changed.*compile it again"):
        collect_kernels(place, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_kernel.py", r"^\S*/my_kernel\.py: expected"),
        ("", r"/: expected"),
        ("no.py:call", r"there is no file \S*/no\.py: expected"),
        ("my_kernel:call", r"there is no file \S*/my_kernel: expected"),
        ("my_kernel.py:other", r"my_kernel\.py has no function other \(it has call, calls, "),
        ("my_kernel.py:torch", r"my_kernel\.py has no function torch \(it has call, calls, "),
        ("empty.py:call", r"empty\.py has no function call \(it has none\): expected"),
    ],
)
def test_a_function_that_is_not_there_is_named(
    place: str, tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "empty.py").write_text("from os.path import join")
    with pytest.raises(MissingData, match=told) as caught:
        write_kernel_bundle(tmp_path / "k.zip", f"{tmp_path}/{name}", TARGET, tmp_path)
    assert "expected FILE.py:FUNCTION" in str(caught.value)


def compiled(place: str, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``costmodel compile --bundle k.zip --kernel PLACE``."""
    line = ["compile", "--bundle", tmp_path / "k.zip", "--kernel", place, *options]
    return subprocess.run(
        [sys.executable, "-m", "costmodel", *line, "--target", "h100-sxm"],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.slow
def test_kernels_that_are_not_tuned_are_not_launched(place: str, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    beside = place.replace(":call", ":beside")
    planned = write_kernel_bundle(tmp_path / "k.zip", beside, Target.named("h100-sxm"), work)
    assert planned == {"calls": 1, "binaries": 3, "failed": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "failed"), [("wrong", (63, 127)), ("half_wrong", (63,))])
def test_what_does_not_compile_is_told_with_the_reason(
    place: str, tmp_path: Path, name: str, failed: tuple[int, ...]
) -> None:
    (tmp_path / "k.zip").write_text("an older one")
    dump = tmp_path / "dump"
    done = compiled(place.replace(":call", f":{name}"), tmp_path, "--json", "--dump", str(dump))
    assert json.loads(done.stdout) == {"calls": 1, "binaries": 2, "failed": len(failed)}
    assert done.returncode == (len(failed) == 2)
    dumped = sorted(path.name for path in dump.glob("*"))
    if len(failed) == 2:
        assert (tmp_path / "k.zip").read_text() == "an older one"
        assert not dumped
    else:
        assert [Path(each).suffix for each in dumped] == [".json", ".ptx", ".sass"]
        with zipfile.ZipFile(tmp_path / "k.zip") as archive:
            assert {f"dump/{each}" for each in dumped} <= {*archive.namelist()}
    for block in failed:
        (line,) = [x for x in done.stderr.splitlines() if f"BLOCK: {block}," in x]
        assert line.startswith("once: ")
        assert "arange's range must be a power of 2" in line


@pytest.mark.slow
def test_no_bundle_of_products_is_left_if_none_compiles(tmp_path: Path) -> None:
    ptxas, file = tmp_path / "ptxas", tmp_path / "work.zip"
    ptxas.write_text('#!/bin/sh\n[ "$1" = --version ] && echo release 12.8, V12.8.93\n')
    ptxas.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "costmodel", "compile", "64", "256", "256", "--limit", "2",
         "--bundle", file, "--target", "h100-sxm"],
        check=False, capture_output=True, text=True, timeout=200,
        env=os.environ | {"TRITON_PTXAS_PATH": str(ptxas), "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"nothing compiles: no {file}" in done.stdout
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "told", "frames"),
    [
        ("adds", "TypeError: unsupported operand", ["adds"]),
        ("deep", "TypeError: unsupported operand", ["deep", "adds"]),
        ("too_few", "TypeError: ", ["too_few"]),
        ("too_many", "TypeError: ", ["too_many"]),
        ("gpu", "", ["gpu"]),
    ],
)
def test_an_error_in_a_users_function_shows_frames_of_their_file_alone(
    place: str, tmp_path: Path, name: str, told: str, frames: list[str]
) -> None:
    place = place.replace(":call", f":{name}")
    done = compiled(place, tmp_path)
    assert done.returncode == 2
    assert f"error: {place} raised {told}" in done.stderr
    assert re.findall(r", in (\w+)$", done.stderr, re.MULTILINE) == frames
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "told", "frames"),
    [
        ("def call(:\n    pass", "SyntaxError: invalid syntax (wrong.py, line 1)", []),
        ("import no_such_thing", "ModuleNotFoundError: No module named", ["<module>"]),
        ("def f():\n    open('no/such')\nf()", "FileNotFoundError: ", ["<module>", "f"]),
    ],
)
def test_an_error_in_a_users_file_shows_frames_of_it_alone(
    tmp_path: Path, text: str, told: str, frames: list[str]
) -> None:
    (tmp_path / "wrong.py").write_text(text)
    place = f"{tmp_path}/wrong.py:call"
    for run in (
        lambda: write_kernel_bundle(tmp_path / "k.zip", place, TARGET, tmp_path),
        lambda: collect_kernels(place, tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(f"{place} raised {told}")) as caught:
            run()
        assert re.findall(r", in (\S+)$", str(caught.value), re.MULTILINE) == frames


def test_a_function_that_calls_no_kernel_is_refused(place: str, tmp_path: Path) -> None:
    nothing = place.replace(":call", ":nothing")
    with pytest.raises(InvalidInput, match="calls no kernel"):
        write_kernel_bundle(tmp_path / "k.zip", nothing, TARGET, tmp_path)
    assert not (tmp_path / "k.zip").exists()
