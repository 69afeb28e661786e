"""``costmodel kernels``: what was tuned is listed, shown, checked, forgotten and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_cli import run, run_json

from costmodel.autotune.store import KernelStore, config_name
from costmodel.data.measurement import Measurement

KEY: dict[str, Any] = {
    "name": "package.module.my_kernel", "source": "12ab", "device": "NVIDIA H200",
    "triton": "3.6.0", "key": {"T": 4096, "flag": True, "x": "torch.bfloat16"},
}  # fmt: skip
OTHER = KEY | {"key": {"T": 64, "flag": False, "x": "torch.bfloat16"}}
FAST = triton.Config({"BLOCK": 64, "D": tl.float16, "T": (1, 2)}, num_warps=8, num_stages=4)
NEAR = triton.Config({"BLOCK": 128, "D": torch.float16}, maxnreg=96, num_ctas=2)
SLOW = triton.Config({"BLOCK": 32, "NAME": "a 'b'"}, num_warps=2)
BROKEN = triton.Config({"BLOCK": 512})


def ok(us: float) -> Measurement:
    return Measurement("ok", us, us, us, 9, 1980)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    """A store of one kernel under two keys; SLOW wins under the second."""
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    store = KernelStore()
    store.note(KEY, config_name(FAST), ok(10.0))
    store.note(KEY, config_name(NEAR), ok(10.1))
    store.note(KEY, config_name(SLOW), ok(30.0))
    store.note(KEY, config_name(BROKEN), Measurement("out_of_resources", error="shared memory"))
    store.choose(KEY, config_name(FAST), "timed all 4")
    store.note(OTHER, config_name(SLOW), ok(2.0))
    store.choose(OTHER, config_name(SLOW), "timed 1")
    return store


def make_configs(source: str) -> list[triton.Config]:
    names: dict[str, Any] = {}
    exec(source, names)
    configs: list[triton.Config] = names["configs"]
    return configs


def test_an_empty_cache_has_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "none"))
    assert run_json("kernels")["entries"] == []
    assert run_json("kernels", "verify")["unusable_files"] == []
    assert run_json("kernels", "clear", "--yes")["removed"] == 0
    assert run("kernels", "show", "x").exit_code == 2


def test_kernels_are_listed(store: KernelStore) -> None:
    entries = run_json("kernels")["entries"]
    assert run_json("kernels", "list")["entries"] == entries
    found = {entry["key"]["key"]["T"]: entry for entry in entries}
    assert (found[4096]["us"], found[4096]["gain"]) == (10.0, 1.01)
    assert found[64]["gain"] == 1.0
    text = run("kernels").stdout
    assert "my_kernel" in text
    assert "T=4096 flag=True x=bfloat16" in text


def test_what_was_not_tried_is_counted(store: KernelStore) -> None:
    """Beside what was: a rest of which nothing was expected, and of which one was tried later."""
    rest = [config_name(triton.Config({"BLOCK": 2**i})) for i in range(20, 23)]
    store.choose(KEY, config_name(FAST), "of some", rest)
    store.note(KEY, rest[0], ok(40.0))
    found = {e["key"]["key"]["T"]: e["tried"] for e in run_json("kernels")["entries"]}
    assert found == {4096: "5 of 7", 64: "1 of 1"}
    assert "5 of 7" in run("kernels").stdout
    assert "5 of 7" in run("kernels", "show", "my_kernel").stdout
    assert run_json("kernels", "verify")["entries"] == 2
    assert len(make_configs(run("kernels", "export", "my_kernel").stdout)) == 2


def test_tables_fit_eighty_columns(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costmodel.cli.common.console_width", lambda: 80)
    for command in (["list"], ["show", "my_kernel"], ["verify"]):
        lines = run("kernels", *command).stdout.splitlines()
        in_table = [line for line in lines if not line[:1].isascii()]  # titles have long paths
        assert max(map(len, in_table)) <= 80
    assert "…" not in run("kernels", "list").stdout


def test_all_timings_are_shown_best_first(store: KernelStore) -> None:
    first = next(e for e in run_json("kernels", "show", "my_kernel") if e["key"] == KEY)
    assert [m["latency_us"] for m in first["measured"]] == [10.0, 10.1, 30.0, None]
    assert first["measured"][-1]["error"] == "shared memory"
    assert (first["chosen"], first["why"]) == (config_name(FAST), "timed all 4")
    text = run("kernels", "show", "my_kernel").stdout
    assert (
        "{'BLOCK': 64, 'D': tl.dtype('fp16'), 'T': (1, 2, )}, num_stages=4, num_warps=8 │" in text
    )
    for part in ("timed all 4", "out_of_resources", "shared memory", "12ab"):
        assert part in text


def test_a_name_that_is_in_no_entry_is_an_error(store: KernelStore) -> None:
    missing = run("kernels", "show", "nothing")
    assert missing.exit_code == 2
    assert "expected 1" in missing.stderr


@pytest.mark.parametrize("command", ["export", "explain"])
def test_what_is_timed_but_not_chosen_is_told(store: KernelStore, command: str) -> None:
    store.note(KEY | {"name": "unfinished"}, config_name(FAST), ok(1.0))
    found = run("kernels", command, "unfinished")
    assert found.exit_code == 2
    assert "timed, but not chosen" in found.stderr
    assert run("kernels", "show", "unfinished").exit_code == 0


def test_what_is_no_entry_is_told(store: KernelStore) -> None:
    assert run("kernels", "verify").exit_code == 0
    assert store.path is not None
    (store.path / "foreign.jsonl").write_bytes(b"\xff[]")
    assert run("kernels", "verify").exit_code == 1
    assert "foreign.jsonl" in run("kernels", "verify").stderr
    assert len(run_json("kernels")["entries"]) == 2
    assert run_json("kernels", "clear", "foreign")["removed"] == 1
    assert run("kernels", "verify").exit_code == 0


@pytest.mark.parametrize("name", ["my_kernel", "package.module.my_kernel"])
def test_a_whole_name_means_that_kernel_alone(store: KernelStore, name: str) -> None:
    """Although it is a part of another one's name; a part of several names means all of them."""
    for other in ("package.module.my_kernel_2", "package.module.not_my_kernel"):
        store.note(KEY | {"name": other}, config_name(FAST), ok(1.0))
    shown = run_json("kernels", "show", name)
    assert {entry["key"]["name"] for entry in shown} == {"package.module.my_kernel"}
    assert run("kernels", "show", "kernel").exit_code == 2
    assert run_json("kernels", "clear", name)["removed"] == len(shown)
    left = {entry["key"]["name"] for entry in run_json("kernels")["entries"]}
    assert left == {"package.module.my_kernel_2", "package.module.not_my_kernel"}
    assert run_json("kernels", "clear", "kernel")["removed"] == 2


def test_a_kernel_is_forgotten(store: KernelStore) -> None:
    store.note(KEY | {"name": "another"}, config_name(FAST), ok(1.0))
    assert run_json("kernels", "clear", "my_kernel")["removed"] == 2
    (left,) = run_json("kernels")["entries"]
    assert left["key"]["name"] == "another"
    assert run_json("kernels", "clear", "--yes")["removed"] == 1


def test_a_file_where_the_folder_should_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").touch()
    assert run("kernels").exit_code == 2


def test_the_source_of_an_export_makes_the_winners(store: KernelStore) -> None:
    for t in (1, 2):
        store.choose(KEY | {"key": {"T": t}}, config_name(NEAR), "guessed")
    source = run("kernels", "export", "my_kernel").stdout
    configs = make_configs(source)
    assert [*map(config_name, configs)] == [*map(config_name, (NEAR, FAST, SLOW))]
    assert run_json("kernels", "export", "my_kernel")["text"] == source.rstrip("\n")


def test_what_has_no_source_is_there_as_a_text(store: KernelStore) -> None:
    key = KEY | {"name": "hooked"}
    hooked = triton.Config({"F": make_configs}, num_warps=1, pre_hook=print)
    store.choose(key, config_name(hooked), "guessed")
    text = "{'F': '<function make_configs>'}, num_stages=3, num_warps=1, pre_hook='<built-in"
    assert text in run("kernels", "show", "hooked").stdout
    source = run("kernels", "export", "hooked").stdout
    assert text in source
    make_configs(source)


def test_what_fla_cannot_read_is_left_out_and_told(store: KernelStore) -> None:
    done = run("kernels", "export", "my_kernel", "--format", "fla")
    assert "left out" in done.stderr
    assert "T=4096" in done.stderr
    (entry,) = json.loads(done.stdout)["autotune_entries"].values()
    assert entry["autotune_key"] == [*OTHER["key"].values()]


def test_two_kernels_are_not_one_list(store: KernelStore) -> None:
    store.choose(KEY | {"name": "my_kernel_2"}, config_name(FAST), "guessed")
    both = run("kernels", "export", "_kernel")
    assert both.exit_code == 2
    assert "2 kernels (my_kernel_2, package.module.my_kernel)" in both.stderr


def test_an_export_for_fla_is_what_fla_reads(store: KernelStore) -> None:
    key = KEY | {"name": "fla.ops.common.chunk_o.chunk_fwd_kernel_o"}
    winner = triton.Config({"BK": 64, "BV": 128}, num_warps=8, num_stages=2)
    store.note(key, config_name(winner), ok(4.0))
    store.choose(key, config_name(winner), "timed 1")
    done = run("kernels", "export", "chunk_fwd", "--format", "fla")
    assert "configs/NVIDIA_H200/chunk_fwd_kernel_o.json" in done.stderr
    content = json.loads(done.stdout)
    assert content["kernel_name"] == "chunk_fwd_kernel_o"
    assert content["triton_version"] == "3.6.0"
    expected = {
        "kwargs": {"BK": 64, "BV": 128}, "num_warps": 8, "num_stages": 2, "num_ctas": 1,
        "maxnreg": None, "ir_override": None,
    }  # fmt: skip
    # The hash is fla 0.6.0's own, of (4096, True, "torch.bfloat16").
    assert content["autotune_entries"] == {
        "dcd4c0e0f3ade2024880d525478f4e6c": {
            "autotune_key": [4096, True, "torch.bfloat16"], "config": expected,
        }
    }  # fmt: skip
    assert content["default_config"] == expected


def test_an_export_for_fla_is_for_one_device(store: KernelStore) -> None:
    store.choose(KEY | {"device": "NVIDIA H100"}, config_name(FAST), "guessed")
    done = run("kernels", "export", "my_kernel", "--format", "fla")
    assert done.exit_code == 2
    assert "NVIDIA H100, NVIDIA H200" in done.stderr
