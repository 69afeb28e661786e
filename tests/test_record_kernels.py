"""The recording of other people's kernels: which may be called, in which order, what is left."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from autotune_fakes import Machine, add, configs, machine_without_gpu

from costmodel.autotune import tuner
from costmodel.autotune.store import KernelStore

JUDGE_FROM_OUTSIDE = (
    *(f"fla.ops.{name}.chunk" for name in (
        "kda", "rwkv7", "attn", "forgetting_attn", "path_attn", "mesa_net", "log_linear_attn",
        "wall_attn", "gdn2", "precond_kda", "precond_gated_delta_rule", "comba", "cyfa",
        "stickbreaking_attn", "cp", "attnres")),
    "fla.layers.attn", "vllm.model_executor.layers.fused_moe",
)  # fmt: skip
"""Modules whose kernels nobody here may run, or that no list names."""


@pytest.fixture
def calls(script: Any) -> Any:
    script("autotune_cases")
    return script("recorded_calls")


@pytest.fixture
def worker(script: Any, calls: Any) -> Any:
    return script("record_worker")


@pytest.fixture
def record(script: Any, calls: Any) -> Any:
    return script("record_kernels")


# --- Which kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", JUDGE_FROM_OUTSIDE)
def test_kernels_that_judge_from_outside_are_neither_learned_nor_judged(
    calls: Any, module: str
) -> None:
    assert not calls.may_learn(module)
    assert not calls.may_judge(module)


@pytest.mark.parametrize("part", ["abc", "gsa", "nsa", "ttt"])
def test_held_out_parts_of_fla_judge_and_are_not_learned(calls: Any, part: str) -> None:
    assert calls.may_judge(f"fla.ops.{part}.chunk")
    assert not calls.may_learn(f"fla.ops.{part}.chunk")
    assert not calls.may_learn(f"fla.ops.{part}")


def test_no_module_is_learned_from_and_judges(calls: Any) -> None:
    for module in (*calls.CALLED, *calls.LEFT_OUT):
        for name in (module, f"{module}.ops"):
            assert not (calls.may_learn(name) and calls.may_judge(name))


def test_what_flag_gems_has_from_vllm_is_not_learned(calls: Any) -> None:
    assert calls.may_learn("flag_gems.ops.mm")
    assert calls.may_learn("hopper.ops.mm")
    assert not calls.may_learn("flag_gems.fused.fused_moe")
    assert not calls.may_learn("flag_gems.fused.FLA.chunk_o")


def test_every_function_called_lies_in_an_allowed_module(calls: Any, record: Any) -> None:
    learned = record.learned_calls(list(record.PACKAGES))
    paths = {call.path for call in learned} - {""}
    assert len(paths) > 150
    assert [path for path in sorted(paths) if not calls.may_learn(path.split(":")[0])] == []
    judging = {call.path for call in record.judging_calls()} - {""}
    assert len(judging) > 8
    assert [path for path in sorted(judging) if not calls.may_judge(path.split(":")[0])] == []


def test_the_calls_of_judges_and_of_what_is_learned_do_not_overlap(record: Any) -> None:
    learned = [call.name for call in record.learned_calls(list(record.PACKAGES))]
    judging = [call.name for call in record.judging_calls()]
    assert len(set(learned)) == len(learned)
    assert len(set(judging)) == len(judging)
    assert not set(learned) & set(judging)
    assert not [name for name in learned if "gsa" in name or "nsa" in name or "liger" in name]


def test_each_package_is_called_in_several_shapes_and_dtypes(record: Any) -> None:
    for package in record.PACKAGES:
        found = record.learned_calls([package])
        assert {call.package for call in found} == {package}
        assert len({call.name.split(":")[1] for call in found if call.path}) >= 3
        assert len({call.dtype for call in found}) >= 2


def tuner_of(module: str, launches: list[str]) -> Any:
    def run(**options: Any) -> None:
        launches.append(module)

    return SimpleNamespace(
        base_fn=SimpleNamespace(__module__=module, __qualname__="kernel"),
        configs=[triton.Config({}), triton.Config({}, num_warps=8)], arg_names=[],
        fn=SimpleNamespace(run=run),
    )  # fmt: skip


def recorder_of(worker: Any, judges: bool, lines: list[Any]) -> Any:
    allowed = worker.may_judge if judges else worker.may_learn
    others = "launch" if judges else "refuse"
    return worker.Recorder(allowed, others, 0, lambda **line: lines.append(line))


@pytest.mark.parametrize("judges", [False, True])
@pytest.mark.parametrize("module", JUDGE_FROM_OUTSIDE)
def test_a_kernel_that_may_not_be_called_is_not_launched(
    worker: Any, module: str, judges: bool
) -> None:
    launches: list[str] = []
    lines: list[Any] = []
    run = recorder_of(worker, judges, lines).wrap(lambda *_: pytest.fail("tuned"))
    with pytest.raises(RuntimeError, match="may not be called"):
        run(tuner_of(module, launches))
    assert launches == lines == []


def test_a_learned_kernel_within_a_judging_call_is_launched_and_not_recorded(worker: Any) -> None:
    launches: list[str] = []
    lines: list[Any] = []
    run = recorder_of(worker, True, lines).wrap(lambda *_: pytest.fail("tuned"))
    run(tuner_of("fla.ops.gla.chunk", launches))
    assert launches == ["fla.ops.gla.chunk"]
    assert lines == []


def test_a_judging_kernel_within_a_learned_call_is_refused(worker: Any) -> None:
    run = recorder_of(worker, False, []).wrap(lambda *_: pytest.fail("tuned"))
    with pytest.raises(RuntimeError, match="may not be called"):
        run(tuner_of("fla.ops.gsa.chunk", []))


# --- What is timed --------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_without_gpu(tmp_path / "kernels") as machine:
        yield machine


def recorded_kernel(blocks: tuple[int, ...] = (64, 32, 128)) -> Any:
    """A kernel of a module that is recorded; its key leaves out all sizes."""
    function = FunctionType(add.__code__, add.__globals__, "add")
    function.__module__, function.__annotations__ = "recorded_tutorials", add.__annotations__
    return triton.autotune(configs(*blocks), [])(triton.jit(function))


def lists_of(machine: Machine) -> list[Any]:
    return KernelStore(machine.folder).entries()


def test_what_is_compiled_ahead_is_neither_launched_nor_timed(
    worker: Any, machine: Machine
) -> None:
    lines: list[Any] = []
    recorder = recorder_of(worker, False, lines)
    kernel, x = recorded_kernel(), torch.zeros(64)
    run = recorder.wrap(tuner.run)
    recorder.is_dry = True
    for n in (64, 48):  # the second is compiled by then
        run(kernel, x, None, x, n, grid=(1,), warmup=False)
    assert len(machine.jobs) >= 3
    assert machine.launches == lists_of(machine) == []
    recorder.is_dry = False
    run(kernel, x, None, x, 64, grid=(1,), warmup=False)
    (found,) = lists_of(machine)
    assert len(found.measured) == 3
    assert all(measurement.ok for measurement in found.measured.values())
    assert {line["package"] for line in lines} == {"costmodel"}


def test_a_size_that_the_tuner_leaves_out_of_its_key_gives_a_list_of_its_own(
    worker: Any, machine: Machine
) -> None:
    recorder = recorder_of(worker, False, [])
    kernel, x = recorded_kernel(), torch.zeros(64)
    run = recorder.wrap(tuner.run)
    for n in (64, 48, 64):
        run(kernel, x, None, x, n, grid=(1,), warmup=False)
    found = lists_of(machine)
    assert sorted(entry.key["key"]["n"] for entry in found) == [48, 64]
    assert all(len(entry.measured) == len(entry.binaries) == 3 for entry in found)


def test_configurations_added_to_a_list_are_told_apart(worker: Any, machine: Machine) -> None:
    lines: list[Any] = []
    recorder = worker.Recorder(lambda _: True, "refuse", 8, lambda **line: lines.append(line))
    kernel, x = recorded_kernel((64,)), torch.zeros(64)
    recorder.wrap(tuner.run)(kernel, x, None, x, 64, grid=(1,), warmup=False)
    (found,) = lists_of(machine)
    assert len(found.measured) > 4
    assert len(lines[0]["listed"]) == 1
    assert set(lines[0]["listed"]) < set(found.measured)


# --- The order, and what is left ------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_each_call_is_made_twice_with_others_between(worker: Any, count: int) -> None:
    names = [f"call{i}" for i in range(count)]
    order = list(worker.in_turns(names, 4))
    assert sorted(order) == sorted((name, is_dry) for name in names for is_dry in (False, True))
    for i, name in enumerate(names):
        first, second = order.index((name, True)), order.index((name, False))
        between = {other for other, is_dry in order[first + 1 : second] if is_dry}
        assert first < second
        assert len(between) == min(4, count - 1 - i)


def test_the_first_call_of_each_family_comes_before_all_second_ones(calls: Any) -> None:
    assert calls.by_turns([["a1", "a2", "a3"], ["b1"], ["c1", "c2"]]) == [
        "a1", "b1", "c1", "a2", "c2", "a3",
    ]  # fmt: skip


def test_calls_that_are_done_or_end_processes_are_not_made_again(
    record: Any, tmp_path: Path
) -> None:
    path = tmp_path / "calls.jsonl"
    lines = [{"began": "a"}, {"ahead": "a"}, {"began": "b"}, {"ended": "b"}, {"done": "c"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"done": "d')
    assert record.left_of(["a", "b", "c", "d"], record.lines_of(path)) == ["a", "b", "d"]
    with path.open("a") as file:
        file.write('\n{"ended": "b"}\n')
    assert record.left_of(["a", "b", "c", "d"], record.lines_of(path)) == ["a", "d"]


def test_a_process_that_says_nothing_is_ended(record: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    record.watch(command, dict(os.environ), tmp_path, time.time() + 60, 0.5)
    assert time.monotonic() - begin < 20


def test_a_process_that_goes_on_too_long_is_ended(record: Any, tmp_path: Path) -> None:
    text = "while True:\n open('calls.jsonl', 'a').write('.'); time.sleep(0.1)"
    command = [sys.executable, "-c", f"import os, time; os.chdir({str(tmp_path)!r})\n{text}"]
    begin = time.monotonic()
    record.watch(command, dict(os.environ), tmp_path, time.time() - 13, 30)
    assert time.monotonic() - begin < 20


def test_calls_that_are_done_are_made_again_with_wider_lists(record: Any) -> None:
    lines = [{"done": "a", "wide": 0}, {"done": "b", "wide": 12}, {"done": "c"}]
    assert record.left_of(["a", "b", "c"], lines) == []
    assert record.left_of(["a", "b", "c"], lines, 12) == ["a", "c"]
    assert record.left_of(["a", "b", "c"], lines, 16) == ["a", "b", "c"]


# --- Widened lists --------------------------------------------------------------------------------


def test_neighbours_are_new_and_change_warps_and_stages_only(worker: Any) -> None:
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
        for block, warps, stages in ((64, 4, 2), (128, 8, 3), (128, 1, 1), (256, 16, 6))
    ]
    found = worker.neighbours(configs, 100)
    every = [(c.kwargs["BLOCK"], c.num_warps, c.num_stages) for c in (*configs, *found)]
    assert len(set(every)) == len(every) > len(configs) + 8
    assert {block for block, *_ in every} == {64, 128, 256}
    assert all(warps in (1, 2, 4, 8, 16) and 1 <= stages <= 6 for _, warps, stages in every)


def test_a_list_that_is_long_enough_gets_no_neighbours(worker: Any) -> None:
    configs = [triton.Config({"BLOCK": 2**i}) for i in range(8)]
    assert worker.neighbours(configs, 8) == []
    assert len(worker.neighbours(configs, 10)) == 2


def test_a_recording_can_be_packed_and_taken_up_again(record: Any, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "k.jsonl").write_text("timings")
    (folder / "calls.jsonl").write_text('{"done": "a"}\n')
    record.pack(folder, tmp_path / "r.tar.xz")
    record.unpack(tmp_path / "r.tar.xz", tmp_path / "again")
    assert (tmp_path / "again" / "kernels" / "k.jsonl").read_text() == "timings"
    assert record.left_of(["a", "b"], record.lines_of(tmp_path / "again" / "calls.jsonl")) == ["b"]
