"""``costmodel.autotune`` means what ``triton.autotune`` does, and keeps what it has timed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import autotune_fakes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import Machine, add, configs, in_place_of_triton, machine_without_gpu
from triton import knobs
from triton.runtime.autotuner import Autotuner as StockAutotuner
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.errors import HostError, InvalidInput
from costmodel.tuning.modes import set_default_mode

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = (64, 32, 128)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    with machine_without_gpu(tmp_path / "kernels") as machine:
        yield machine
        monkeypatch.undo()  # what a test has put over the stand-ins goes before them


@pytest.fixture
def replaced() -> Iterator[None]:
    with in_place_of_triton():
        yield


def ours(*args: Any, **options: Any) -> Any:
    return costmodel.autotune(*args, **options)


def kernel_of(tune: Any = ours, function: Any = add, key: Any = ("n",), **options: Any) -> Any:
    options = {"configs": configs(*BLOCKS)} | options
    return tune(options.pop("configs"), list(key), **options)(triton.jit(function))


def call(kernel: Any, n: int = 64, size: int = 64) -> torch.Tensor:
    x = torch.zeros(size)
    kernel[(1,)](x, None, x, n)
    return x


# --- The same as Triton's -------------------------------------------------------------------------


@pytest.fixture
def both(machine: Machine) -> Callable[..., list[Any]]:
    """Runs the same program under Triton's tuner and ours."""

    def bench(launch: Any, quantiles: Any) -> list[float]:
        before = machine.now_us
        launch()
        return [(machine.now_us - before) / 1e3] * 3

    def stock(*args: Any, **options: Any) -> Any:
        return triton.autotune(*args, do_bench=bench, **options)

    return lambda program: [program(tune) for tune in (stock, ours)]


def test_attributes_are_those_of_triton(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> Any:
        with warnings.catch_warnings(action="ignore"):
            kernel = kernel_of(tune, key=["n", "BLOCK", "unknown"])
        call(kernel)
        call(kernel, 65)
        return {
            "class": isinstance(kernel, StockAutotuner),
            "configs": list(map(str, kernel.configs)),
            "keys": kernel.keys,
            "cache": {key: str(config) for key, config in kernel.cache.items()},
            "best": str(kernel.best_config),
            "timings": {str(c): times for c, times in kernel.configs_timings.items()},
            "names": kernel.arg_names,
            "base": kernel.base_fn,
            "nargs": kernel.nargs,
            "warmup": len(kernel.warmup(torch.zeros(1), None, torch.zeros(1), 3, grid=(1,))),
        }

    stock, own = both(program)
    assert own == stock
    assert stock["best"].startswith("BLOCK: 32")


def test_hooks_see_what_they_see_under_triton(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> Any:
        seen: list[tuple[str, Any]] = []

        def note(kind: str) -> Any:
            def hook(named: dict[str, Any], **more: Any) -> None:
                names = {name for name in named if name not in ("num_ctas", "maxnreg", "warmup")}
                seen.append((kind, sorted(names), named["BLOCK"], more))

            return hook

        own = [triton.Config({"BLOCK": 32}, pre_hook=note("config")), *configs(64)]
        kernel = kernel_of(tune, configs=own, pre_hook=note("pre"), post_hook=note("post"))
        x = torch.zeros(64)
        kernel[(1,)](x, None, out_ptr=x, n=64)
        timed = {kind for kind, *_ in seen}
        last = seen[-2:]
        seen.clear()
        kernel[(1,)](x, None, out_ptr=x, n=64)
        return timed, last, seen

    stock, own = both(program)
    assert own == stock
    assert [kind for kind, *_ in own[1]] == ["pre", "config"]
    assert [kind for kind, *_ in own[2]] == ["config"]


def test_what_is_to_be_zero_is_zero_at_each_launch_and_restored_values_are_as_before(
    machine: Machine, both: Callable[..., list[Any]]
) -> None:
    def program(tune: Any) -> Any:
        seen: list[tuple[float, float]] = []

        def work(launch: Any) -> None:
            x, out = launch.named["x_ptr"], launch.named["out_ptr"]
            seen.append((float(x[0]), float(out[0])))
            x += 1
            out += 1

        machine.effect = work
        kernel = kernel_of(tune, reset_to_zero=["out_ptr", "y_ptr"], restore_value=["x_ptr"])
        x, y, out = torch.full((64,), 5.0), torch.ones(64), torch.full((64,), 7.0)
        kernel[(1,)](x, y, out, 64)
        found = [set(seen), float(x[0]), float(out[0]), float(y[0])]
        kernel[(1,)](x, y, out, 64)
        return [*found, float(x[0]), float(out[0])]

    stock, own = both(program)
    assert own == stock
    assert own == [{(5.0, 0.0)}, 6.0, 1.0, 0.0, 7.0, 2.0]


def test_a_later_tuning_does_not_zero_what_earlier_calls_added_up(
    both: Callable[..., list[Any]], machine: Machine
) -> None:
    """The third and fourth call are of another kind for ours only."""

    def program(tune: Any) -> Any:
        def work(launch: Any) -> None:
            launch.named["out_ptr"] += 1

        machine.effect = work
        kernel = kernel_of(tune, key=(), reset_to_zero=["out_ptr"])
        out = torch.full((64,), 7.0)
        sums = []
        for n in (64, 64, 33, 1):
            kernel[(1,)](torch.zeros(64), None, out, n)
            sums.append(float(out[0]))
        return sums

    stock, own = both(program)
    assert own == stock == [1.0, 2.0, 3.0, 4.0]


def test_none_is_neither_zeroed_nor_restored(machine: Machine) -> None:
    kernel = kernel_of(reset_to_zero=["y_ptr"], restore_value=["y_ptr"])
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


def test_what_the_timings_wrote_is_undone(machine: Machine) -> None:
    def work(launch: Any) -> None:
        launch.named["out_ptr"].add_(1)

    machine.effect = work
    assert call(kernel_of())[0] == 1
    assert machine.timed() == set(BLOCKS)


@pytest.mark.fault("B44")
def test_hooks_are_not_timed(machine: Machine) -> None:
    def wait(named: Any) -> None:
        machine.now_us += 1000 if named["BLOCK"] == 32 else 0

    kernel = kernel_of(configs=[triton.Config({"BLOCK": b}, pre_hook=wait) for b in BLOCKS])
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert kernel.configs_timings[kernel.best_config][0] == pytest.approx(0.032)


def prune(configs: list[Any], named: dict[str, Any], **more: Any) -> list[Any]:
    assert set(named) == {"x_ptr", "y_ptr"}
    assert set(more) >= {"n", "out_ptr", "grid"}
    return configs[:2]


PRUNED = {
    "early": ({"early_config_prune": prune}, {64, 32}),
    "first two": ({"perf_model": lambda BLOCK, **_: BLOCK, "top_k": 2}, {64, 32}),
    "last two": ({"perf_model": lambda BLOCK, **_: -BLOCK, "top_k": 2}, {128, 64}),
    "a share": ({"perf_model": lambda BLOCK, **_: BLOCK, "top_k": 0.4}, {32}),
    "more than there are": ({"perf_model": lambda **_: 1 / 0, "top_k": 9}, set(BLOCKS)),
}


@pytest.mark.parametrize("case", PRUNED)
def test_pruning_is_that_of_triton(
    machine: Machine, both: Callable[..., list[Any]], case: str
) -> None:
    by, expected = PRUNED[case]

    def program(tune: Any) -> Any:
        machine.launches.clear()
        x = torch.zeros(64)
        kernel_of(tune, prune_configs_by=by)[(1,)](x, None, out_ptr=x, n=64)
        return machine.timed()

    stock, own = both(program)
    assert own == stock == expected


def test_a_share_of_nothing_tunes_all(machine: Machine) -> None:
    kernel = kernel_of(prune_configs_by={"perf_model": lambda **_: 1.0, "top_k": 0.1})
    call(kernel)
    assert machine.timed() == set(BLOCKS)


def test_a_pruning_may_be_a_generator(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> Any:
        pruning = {"early_config_prune": lambda own, named, **_: (c for c in own[:2])}
        kernel = kernel_of(tune, prune_configs_by=pruning)
        call(kernel)
        return kernel.best_config.kwargs

    assert both(program) == [{"BLOCK": 32}] * 2


def test_pruning_to_nothing_is_tritons_error(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> Any:
        kernel = kernel_of(tune, prune_configs_by={"early_config_prune": lambda *_, **__: []})
        with pytest.raises(Exception, match="No valid autotuner configs") as raised:
            call(kernel)
        return type(raised.value)

    stock, own = both(program)
    assert own == stock


def even(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x_ptr + at, 1.0)
    else:
        tl.store(x_ptr + at, 2.0, mask=at < n)


def is_even(named: dict[str, Any]) -> bool:
    return bool(named["n"] % named["BLOCK"] == 0)


@pytest.mark.parametrize("inside", [False, True])
def test_heuristics(machine: Machine, both: Callable[..., list[Any]], inside: bool) -> None:
    def program(tune: Any) -> Any:
        tuned, jit = tune(configs(64, 32), ["n"]), triton.jit(even)
        machine.launches.clear()
        if inside:
            kernel = tuned(triton.heuristics({"EVEN": is_even})(jit))
        else:  # it is asked before there is a configuration
            kernel = triton.heuristics({"EVEN": lambda named: named["n"] == 96})(tuned(jit))
        kernel[(1,)](torch.zeros(96), 96)
        return [(x.block, x.named["EVEN"]) for x in machine.launches][-1], machine.timed()

    stock, own = both(program)
    assert own == stock == ((32, True), {64, 32})


def many(x_ptr, n, flag, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, BLOCK), n, mask=tl.arange(0, BLOCK) < 1)


VALUES = [
    None, True, 7, "fast", 0.5, torch.float16, (1, 2), ("a", (None, 3)), tl.constexpr(4),
    np.int64(7), call,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_of_any_kind_in_the_key(
    machine: Machine, both: Callable[..., list[Any]], value: Any
) -> None:
    def program(tune: Any) -> Any:
        kernel = kernel_of(tune, many, ["KIND", "BLOCK"])
        x = torch.zeros(8)
        for kind in (value, value, "other"):
            kernel[(1,)](x, 3, 2.0, KIND=kind)
        return list(kernel.cache)

    stock, own = both(program)
    assert own == stock
    machine.restart()
    if isinstance(value, FunctionType):  # it has another address there
        value = FunctionType(value.__code__, {}, value.__name__)
    kernel = kernel_of(ours, many, ["KIND", "BLOCK"])
    kernel[(1,)](torch.zeros(8), 3, 2.0, KIND=value)
    assert len(machine.launches) == 1


@pytest.mark.parametrize("stderr", [None, SimpleNamespace(write=len, flush=int)])
def test_a_program_may_have_another_stderr(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, stderr: Any
) -> None:
    monkeypatch.setattr(autotune_fakes.tuning, "_SILENT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stderr)
    kernel = kernel_of()
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.parametrize("key", [[], ["flag"]])
def test_numbers_of_numpy(machine: Machine, key: list[str]) -> None:
    kernel = kernel_of(ours, many, key)
    for _ in range(2):  # 1 / np.sqrt(d) is the usual scale of attention
        kernel[(1,)](torch.zeros(8), 3, np.float64(0.125), KIND=np.int64(7))
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert len(machine.jobs) == 3


def test_an_unhashable_value_is_tritons_error(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            kernel_of(tune, many)[(1,)](torch.zeros(8), 3, 2.0, KIND=[1, 2])

    both(program)


def test_one_configuration_is_launched_at_once(
    machine: Machine, both: Callable[..., list[Any]]
) -> None:
    def program(tune: Any) -> Any:
        machine.launches.clear()
        hooked: list[int] = []
        only = triton.Config({"BLOCK": 16}, pre_hook=lambda named: hooked.append(named["n"]))
        kernel = kernel_of(tune, configs=[only])
        call(kernel)
        return [x.block for x in machine.launches], hooked, str(kernel.best_config)

    stock, own = both(program)
    assert own == stock
    assert own[:2] == ([16], [64])
    assert not machine.jobs


def test_no_configuration_is_tritons_default(
    machine: Machine, both: Callable[..., list[Any]]
) -> None:
    def program(tune: Any) -> Any:
        kernel = kernel_of(tune, configs=[])
        x = torch.zeros(16)
        kernel[(1,)](x, None, x, 16, BLOCK=16)
        return list(map(str, kernel.configs)), machine.launches[-1].options["num_warps"]

    stock, own = both(program)
    assert own == stock


def test_a_configuration_that_is_there_twice_is_timed_once(machine: Machine) -> None:
    kernel = kernel_of(configs=configs(64, 32, 64, 32))
    call(kernel)
    assert len(machine.jobs) == 2
    machine.restart()
    call(kernel_of(configs=configs(64, 32, 64, 32)))
    assert len(machine.launches) == 1


def test_a_name_that_is_given_twice_is_an_error(both: Callable[..., list[Any]]) -> None:
    def program(tune: Any) -> None:
        x = torch.zeros(8)
        with pytest.raises((TypeError, ValueError), match="BLOCK"):
            kernel_of(tune)[(1,)](x, x, x, 8, BLOCK=8)

    both(program)


def described(x_desc, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x_desc.store([0], x_desc.load([0]) + n)


def test_hooks_that_change_a_descriptor(machine: Machine) -> None:
    def hook(named: dict[str, Any]) -> None:
        named["x_desc"].block_shape = [named["BLOCK"]]

    machine.effect = lambda launch: None
    own = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS]
    kernel = kernel_of(function=described, configs=own)
    descriptor = TensorDescriptor(torch.zeros(256), [256], [1], [16])
    kernel[(1,)](descriptor, 1)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert descriptor.block_shape == [32]
    assert len({job.text for job in machine.jobs}) == 3


@pytest.mark.parametrize("of", [ours, triton.autotune])
def test_printing(
    machine: Machine,
    replaced: None,
    of: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call(kernel_of(of))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(knobs.autotuning, "print", True)
    kernel = kernel_of(of)
    call(kernel, 65)
    told = capsys.readouterr().out
    assert "Triton autotuning for function add,\nwith key as (65, 'torch.float32'" in told
    assert "best config selected: BLOCK: 32, num_warps: 4" in told
    call(kernel, 65)
    assert capsys.readouterr().out == ""


# --- What is one kind of call ---------------------------------------------------------------------


def test_positional_and_keyword_arguments_are_one_tuning(machine: Machine) -> None:
    kernel = kernel_of()
    x = torch.zeros(64)
    kernel[(1,)](x, None, x, 64)
    done = len(machine.launches)
    kernel[(1,)](x, None, n=64, out_ptr=x)
    kernel[(1,)](n=64, out_ptr=x, y_ptr=None, x_ptr=x)
    assert len(machine.launches) == done + 2
    assert all(x.block == 32 for x in machine.launches[done:])


def specialised(machine: Machine, kernel: Any, *args: Any) -> bool:
    """Whether a call is tuned."""
    done = len(machine.launches)
    kernel[(1,)](*args)
    return len(machine.launches) > done + 1


def test_classes_of_arguments(machine: Machine) -> None:
    kernel = kernel_of(key=[])
    x, odd = torch.zeros(65), torch.zeros(65)[1:]
    assert specialised(machine, kernel, x, None, x, 64)
    assert not specialised(machine, kernel, x, None, x, 32)
    assert specialised(machine, kernel, x, None, x, 65)
    assert not specialised(machine, kernel, x, None, x, 67)
    assert specialised(machine, kernel, x, None, x, 1)
    assert specialised(machine, kernel, x, x, x, 64)
    assert specialised(machine, kernel, odd, None, x, 64)
    assert specialised(machine, kernel, x.half(), None, x, 64)
    machine.device = 1
    assert not specialised(machine, kernel, x, None, x, 64)  # a card of the same kind
    machine.target = replace(machine.target, device=replace(machine.target.device, product="X"))
    machine.device = 2
    assert specialised(machine, kernel, x, None, x, 64)


def test_which_pointer_is_none_tells_calls_apart(machine: Machine) -> None:
    def two(x_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        if a_ptr is not None:
            tl.store(x_ptr + at, tl.load(a_ptr + at), mask=at < n)
        if b_ptr is not None:
            tl.store(x_ptr + at, tl.load(b_ptr + at), mask=at < n)

    kernel = kernel_of(function=two)
    x = torch.zeros(64)
    assert specialised(machine, kernel, x, x, None, 64)
    assert specialised(machine, kernel, x, None, x, 64)


def test_what_triton_does_not_specialise_is_not_in_the_key(machine: Machine) -> None:
    jit = triton.jit(add, do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
    kernel = costmodel.autotune(configs(*BLOCKS), [])(jit)
    x, odd = torch.zeros(65), torch.zeros(65)[1:]
    assert specialised(machine, kernel, x, None, x, 64)
    assert not specialised(machine, kernel, odd, None, x, 1)
    assert not specialised(machine, kernel, x, None, x, 65)
    assert specialised(machine, kernel, x, None, odd, 65)


@pytest.mark.fault("B23", "B41")
def test_a_tensor_in_the_key_is_there_by_its_type(machine: Machine) -> None:
    class Unprintable(torch.Tensor):
        def __repr__(self) -> str:  # type: ignore[override]
            raise AssertionError("it would be copied to the host")

    kernel = kernel_of(key=["x_ptr", "n"])
    seen = []
    for i in range(3):
        x = torch.zeros(64).as_subclass(Unprintable)
        seen.append(weakref.ref(x))
        assert specialised(machine, kernel, x, None, x, 64) is (i == 0)
    machine.launches.clear()
    del x
    gc.collect()
    assert [x() for x in seen] == [None] * 3
    machine.restart()
    x = torch.ones(64)
    assert not specialised(machine, kernel_of(key=["x_ptr", "n"]), x, None, x, 64)


@pytest.mark.fault("B15")
def test_a_hook_may_call_a_kernel_that_is_tuned(machine: Machine) -> None:
    inner = kernel_of(key=[])

    def call_inner(named: Any) -> None:
        call(inner)

    own = [triton.Config({"BLOCK": b}, pre_hook=call_inner) for b in BLOCKS]
    outer = kernel_of(configs=own)
    in_threads(lambda i: call(outer), 2)
    assert inner.best_config.kwargs == outer.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.fault("B23")
def test_sizes_that_are_not_in_the_key_are_not_tuned_anew(machine: Machine) -> None:
    kernel = kernel_of(key=[])
    for n in range(1, 200):
        call(kernel, n, 256)
    last = machine.launches[-180:]
    assert {launch.block for launch in last} == {32}
    assert len({launch.named["n"] for launch in last}) == 180


# --- In place of Triton's -------------------------------------------------------------------------


class Plain(StockAutotuner):  # type: ignore[misc]
    """A subclass that leaves ``run`` alone."""


class Wrapping(StockAutotuner):  # type: ignore[misc]
    """A subclass that does something before."""

    calls = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().run(*args, **kwargs)


class Own(StockAutotuner):  # type: ignore[misc]
    """A subclass that chooses by itself, as FlagGems' does."""

    __module__ = "flag_gems.utils.libentry"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, BLOCK=128)


def by_hand(cls: Any) -> Any:
    jit = triton.jit(add)
    return cls(jit, jit.arg_names, configs(*BLOCKS), ["n"], None, None)


@pytest.mark.parametrize("cls", [StockAutotuner, Plain, Wrapping, Own])
def test_tuners_built_before_and_after(machine: Machine, cls: Any) -> None:
    before = by_hand(cls)
    with in_place_of_triton():
        costmodel.replace_triton_autotune()  # again, which changes nothing
        for kernel in (before, by_hand(cls)):
            call(kernel)
            assert kernel.best_config.kwargs == {"BLOCK": 32}
            assert kernel.cache


def test_a_subclass_with_its_own_run_that_is_made_later(machine: Machine, replaced: None) -> None:
    class Later(Own):
        __module__ = "flag_gems.later"

        def run(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    kernel = by_hand(Later)
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


def test_what_is_in_the_cache_of_the_tuner_is_taken(machine: Machine, replaced: None) -> None:
    # As fla does: its subclass puts what it finds in files of its own there.
    kernel = by_hand(StockAutotuner)
    kernel.cache[(64, "torch.float32", "torch.float32")] = triton.Config({"BLOCK": 16})
    call(kernel)
    assert [launch.block for launch in machine.launches] == [16]
    assert call(kernel, 65) is not None
    assert kernel.best_config.kwargs == {"BLOCK": 32}


def test_the_package_is_the_decorator() -> None:
    assert costmodel.autotune.tuner.autotune is not None
    with pytest.raises(InvalidInput, match="mode='fast'"):
        costmodel.autotune(configs(32), [], mode="fast")
    with pytest.raises(InvalidInput, match="budget_s=0"):
        costmodel.autotune(configs(32), [], budget_s=0)
    with pytest.raises(InvalidInput, match="check='some'"):
        costmodel.autotune(configs(32), [], check="some")
    with pytest.raises(InvalidInput, match="model"):
        costmodel.autotune(configs(32), [], model="mine")
    with pytest.raises(InvalidInput, match="top_k"):
        costmodel.prune_configs_by(0)


def test_only_the_pruning(machine: Machine, both: Callable[..., list[Any]]) -> None:
    def outcome(job: Any, artifact: Any) -> Any:
        if job.options["num_warps"] == 8:
            return replace(artifact, status="compile_error", error="no")
        return replace(artifact, ptx={"score_cp_async": float(job.options["num_warps"])})

    machine.outcome = outcome
    own = [c for warps in (1, 2, 4, 8) for c in configs(32, num_warps=warps)]

    def program(tune: Any) -> Any:
        machine.launches.clear()
        kernel = kernel_of(tune, configs=own, prune_configs_by=costmodel.prune_configs_by(top_k=2))
        call(kernel)
        return {launch.options["num_warps"] for launch in machine.launches}

    stock, mine = both(program)
    assert stock == mine == {2, 4}


@pytest.mark.fault("N3")
def test_a_machine_that_cannot_compile_prunes_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench(launch: Any, quantiles: Any) -> list[float]:
        launch()
        return [1.0] * 3

    def submit(*_: Any, **__: Any) -> Any:
        raise HostError("no room")

    monkeypatch.setattr(machine, "submit", submit)
    pruning = costmodel.prune_configs_by(top_k=1)
    kernel = kernel_of(triton.autotune, do_bench=bench, prune_configs_by=pruning)
    with pytest.warns(UserWarning, match="add is not pruned: no room"):
        call(kernel)
    assert machine.timed() == set(BLOCKS)


# --- Modes ----------------------------------------------------------------------------------------


def test_never_takes_the_first_or_the_known(machine: Machine) -> None:
    kernel = kernel_of(mode="never")
    call(kernel)
    assert machine.timed() == {64}
    assert not machine.jobs
    call(kernel_of())
    machine.restart()
    call(kernel_of(mode="never"))
    assert machine.timed() == {32}


def test_predict_times_nothing_and_leaves_out_what_does_not_compile(machine: Machine) -> None:
    machine.outcome = lambda job, artifact: replace(
        artifact,
        status="compile_error" if job.options["num_warps"] == 8 else "ok",
        ptx={"score_cp_async": 100.0 * job.options["num_warps"]},
    )
    own = [c for warps in (8, 2, 4) for c in configs(32, num_warps=warps)]
    kernel = kernel_of(mode="predict", model="ptx-score", configs=own)
    call(kernel)
    assert len(machine.launches) == 1
    assert kernel.best_config.num_warps == 4


@pytest.mark.parametrize("fast", [1, 2, 4])
def test_the_model_predicts_from_the_binaries(machine: Machine, fast: int) -> None:
    """What spills thousands of bytes is slow, whatever else is said of it."""
    machine.outcome = lambda job, artifact: replace(
        artifact,
        registers=64 if (spared := job.options["num_warps"] == fast) else 255,
        spill_bytes=0 if spared else 8000,
        ptx={"all_instructions": 200.0 if spared else 9000.0, "score_cp_async": 1.0 - spared},
    )
    own = [c for warps in (1, 2, 4) for c in configs(32, num_warps=warps)]
    kernel = kernel_of(mode="predict", configs=own)
    call(kernel)
    assert kernel.best_config.num_warps == fast


def test_background_answers_at_once_and_tunes_when_all_is_compiled(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    waiting: list[tuple[Future[Any], Any]] = []
    submit = machine.submit

    def later(*args: Any, **options: Any) -> Any:
        future: Future[Any] = Future()
        waiting.append((future, submit(*args, **options).result()))
        return future

    monkeypatch.setattr(machine, "submit", later)
    kernel = kernel_of(mode="background")
    call(kernel)
    call(kernel)
    assert [launch.block for launch in machine.launches] == [64, 64]
    assert len(waiting) == 3
    for future, artifact in waiting:
        future.set_result(artifact)
    monkeypatch.setattr(machine, "submit", submit)
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    done = len(machine.launches)
    call(kernel)
    assert len(machine.launches) == done + 1


def test_the_default_mode_holds(machine: Machine) -> None:
    set_default_mode("never")
    try:
        call(kernel_of())
        assert machine.timed() == {64}
        call(kernel_of(mode="auto"))
        assert machine.timed() == set(BLOCKS)
    finally:
        set_default_mode(None)


@pytest.mark.fault("B49")
def test_no_call_waits_for_what_takes_far_longer_than_the_rest(tmp_path: Path) -> None:
    """A block that is far too large may compile for ten seconds."""
    from concurrent.futures import Future

    never: Future[Any] = Future()
    with machine_without_gpu(tmp_path, patience_s=0.0) as machine:
        submit = machine.submit

        def some(key: str, *args: Any, **options: Any) -> Any:
            done = submit(key, *args, **options)
            return never if machine.jobs[-1].options["num_warps"] == 4 else done

        machine.submit = some  # type: ignore[method-assign]
        own = [*configs(64, 128, 32, num_warps=1), *configs(16, num_warps=4)]
        kernel = kernel_of(configs=own)
        call(kernel)
        assert kernel.best_config.kwargs == {"BLOCK": 32}
        assert never.cancelled()
        machine.restart()
        call(kernel_of(configs=own))
        assert len(machine.launches) == 1


@pytest.mark.fault("B49")
def test_what_never_compiles_holds_up_no_call(tmp_path: Path) -> None:
    """All others are compiled before a call may leave something."""
    from concurrent.futures import Future

    with machine_without_gpu(tmp_path, patience_s=0.2) as machine:
        submit = machine.submit

        def some(key: str, *args: Any, **options: Any) -> Any:
            done = submit(key, *args, **options)
            return done if machine.jobs[-1].options["num_warps"] == 4 else Future()

        machine.submit = some  # type: ignore[method-assign]
        kernel = kernel_of(configs=[*configs(*BLOCKS), *configs(16, num_warps=8)])
        call(kernel)
        done = len(machine.launches)
        call(kernel)
        assert machine.timed() == set(BLOCKS)
        assert len(machine.launches) == done + 1
        assert kernel.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.fault("B49")
def test_a_slow_compiler_is_waited_for(tmp_path: Path) -> None:
    """Where every binary takes longer than the patience, none of them is a straggler."""
    from concurrent.futures import Future

    with machine_without_gpu(tmp_path, patience_s=0.0) as machine:
        submit = machine.submit

        def slow(*args: Any, **options: Any) -> Any:
            future: Future[Any] = Future()
            artifact = submit(*args, **options).result()
            threading.Timer(0.3, future.set_result, [artifact]).start()
            return future

        machine.submit = slow  # type: ignore[method-assign]
        call(kernel := kernel_of())
        assert kernel.best_config.kwargs == {"BLOCK": 32}
        assert machine.timed() == set(BLOCKS)


def test_what_must_be_tried_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library among the configurations may be the fastest, and no model says so."""
    machine.us = lambda launch: 1.0 if launch.block == 2048 else float(launch.block)
    kernel = kernel_of(configs=configs(*(2**i for i in range(4, 12)), *range(3000, 3020)))
    kernel.fn.must_try = lambda config: config.kwargs["BLOCK"] == 2048
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 2048}
    assert len(machine.timed()) < 20


@pytest.mark.fault("B49")
def test_nothing_is_left_that_is_compiled(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune_fakes.tuning, "_PATIENCE_S", 0.0)  # as if timing took long
    call(kernel_of())
    machine.restart()
    call(kernel_of())
    assert len(machine.launches) == 1


def test_what_the_last_of_a_long_list_writes_is_undone_too(machine: Machine) -> None:
    def kernel(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(y_ptr + n if KIND else x_ptr + n, 1.0)

    def work(launch: Any) -> None:
        launch.named["y_ptr" if launch.named["KIND"] else "x_ptr"].add_(1)

    machine.effect = work
    machine.us = lambda launch: 9.0 + launch.named["KIND"]
    kinds = [(0, warps, stages) for warps in (1, 2, 4) for stages in range(1, 91)] + [(1, 8, 1)]
    own = [
        triton.Config({"BLOCK": 16, "KIND": kind}, num_warps=warps, num_stages=stages)
        for kind, warps, stages in kinds
    ]
    x, y = torch.zeros(64), torch.zeros(64)
    kernel_of(function=kernel, configs=own, mode="exhaustive")[(1,)](x, y, 8)
    assert {launch.named["KIND"] for launch in machine.launches} == {0, 1}
    assert (float(x[0]), float(y[0])) == (1.0, 0.0)


@pytest.mark.fault("B61")
def test_a_budget_stops_and_the_next_process_goes_on(machine: Machine) -> None:
    machine.slow_s = 0.01
    blocks = (256, 16, 32, 64, 128, 512)
    kernel = kernel_of(configs=configs(*blocks), budget_s=0.1)
    call(kernel)
    timed = machine.timed()
    assert 0 < len(timed) < 6
    assert kernel.best_config.kwargs["BLOCK"] == min(timed)
    machine.restart()
    machine.slow_s = 0
    kernel = kernel_of(configs=configs(*blocks))
    call(kernel)
    assert len(timed | machine.timed()) >= 5
    assert kernel.best_config.kwargs == {"BLOCK": 16}


@pytest.mark.fault("B61")
def test_a_budget_that_is_too_small_to_compare_is_not_spent_by_each_process(
    machine: Machine,
) -> None:
    machine.slow_s = 0.02
    for _ in range(4):
        machine.restart()
        call(kernel_of(configs=configs(32, 64), budget_s=0.3))
    assert len(machine.launches) == 1


@pytest.mark.fault("B61")
def test_a_budget_that_only_failures_have_used_up_is_not_an_error(machine: Machine) -> None:
    import time

    def outcome(job: Any, artifact: Any) -> Any:
        if job.options["num_warps"] == 1:  # which comes first
            time.sleep(0.02)
            return replace(artifact, status="compile_error", error="no")
        return artifact

    machine.outcome = outcome
    own = [*configs(32, num_warps=1), *configs(64, 128, num_warps=4)]
    kernel = kernel_of(configs=own, budget_s=0.01)
    call(kernel)
    assert kernel.best_config.num_warps == 4


@pytest.mark.fault("B61")
def test_what_is_far_slower_is_launched_a_few_times(machine: Machine) -> None:
    machine.us = lambda launch: 1e6 if launch.block == 128 else float(launch.block)
    kernel = kernel_of(configs=configs(32, 64, 128))
    call(kernel)
    assert machine.now_us < 8e6
    assert kernel.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.fault("B61")
def test_a_slow_kernel_is_launched_four_times_and_its_finalists_more(machine: Machine) -> None:
    machine.us = lambda launch: 1e4 + launch.block
    call(kernel_of(configs=configs(*(2**i for i in range(4, 14))), mode="exhaustive"))
    launches = sorted(Counter(launch.block for launch in machine.launches).values())
    assert launches[:7] == [4] * 7
    assert len(launches) == 10


@pytest.mark.fault("B05")
def test_nothing_is_timed_while_a_graph_is_captured(machine: Machine) -> None:
    kernel = kernel_of(restore_value=["x_ptr"])
    machine.capturing = True
    call(kernel)
    assert [launch.block for launch in machine.launches] == [64]
    assert not machine.jobs
    machine.capturing = False
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    machine.restart()
    machine.capturing = True
    call(kernel_of())
    assert [launch.block for launch in machine.launches] == [32]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("knows_triton", [False, True])
def test_torch_compile_traces_nothing_of_a_tuner_with_hooks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, knows_triton: bool
) -> None:
    """It breaks the graph there, and warns of what it cannot trace."""
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda *_: knows_triton)
    traced: list[bool] = []

    def device() -> int:
        traced.append(torch.compiler.is_dynamo_compiling())
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getDevice", device)
    machine.effect = lambda launch: launch.named["out_ptr"].add_(1)
    own = configs(*BLOCKS, pre_hook=lambda named: named["out_ptr"].zero_())
    kernel = kernel_of(configs=own)

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[(1,)](x + 1, None, out, 64)
        return out * 2

    compiled: Any = torch.compile(step, backend="eager")
    for _ in range(3):
        assert compiled(torch.zeros(64)).eq(2).all()
    torch.compiler.reset()
    assert machine.timed() == set(BLOCKS)
    assert traced
    assert not any(traced)


def test_a_call_without_work_decides_nothing(machine: Machine) -> None:
    """As of an expert that gets no tokens, the number of which is not in the key."""
    kernel, x = kernel_of(), torch.zeros(0)
    for _ in range(2):
        kernel[lambda meta: (x.numel() // meta["BLOCK"], 4)](x, None, x, 64)
    assert [launch.block for launch in machine.launches] == [64, 64]
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


# --- Threads, ranks -------------------------------------------------------------------------------


def in_threads(work: Callable[[int], Any], count: int = 8) -> list[Any]:
    barrier = threading.Barrier(count)

    def begin(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.fault("B15")
def test_threads_tune_a_key_once(machine: Machine) -> None:
    kernel = kernel_of()
    in_threads(lambda i: call(kernel))
    assert len(machine.jobs) == 3
    assert [launch.block for launch in machine.launches[-8:]] == [32] * 8


@pytest.mark.fault("B15")
@pytest.mark.parametrize("only", [False, True])
def test_threads_do_not_mix_their_arguments(machine: Machine, only: bool) -> None:
    def hook(named: dict[str, Any]) -> None:
        assert float(named["x_ptr"][0]) == named["n"]

    def work(launch: Any) -> None:
        assert float(launch.named["x_ptr"][0]) == launch.named["n"]

    machine.effect = work
    blocks = BLOCKS[:1] if only else BLOCKS
    own = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in blocks]
    kernel = kernel_of(configs=own)

    def calls(i: int) -> None:
        for n in range(100 * i + 2, 100 * i + 5):
            x = torch.full((4,), float(n))
            kernel[(1,)](x, None, x, n)

    in_threads(calls, 4)
    assert len(kernel.cache) == (0 if only else 12)


@pytest.mark.fault("B29")
def test_the_rank_that_chooses_first_chooses_for_all(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    def forget() -> None:
        machine.restart()
        for path in machine.folder.glob("*"):
            path.unlink()

    machine.us = lambda launch: 1000.0 - launch.block
    call(kernel_of())  # this process knows 128
    machine.us = lambda launch: float(launch.block)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        kernel = kernel_of()
        call(kernel)
        assert kernel.best_config.kwargs == {"BLOCK": 128}
        forget()
        kernel = kernel_of()  # as another rank, whose own timings say 32
        call(kernel)
        assert machine.timed() == set(BLOCKS)
        assert kernel.best_config.kwargs == {"BLOCK": 128}
        forget()
        set_default_mode("never")
        kernel = kernel_of()
        call(kernel)
        assert kernel.best_config.kwargs == {"BLOCK": 128}
    finally:
        set_default_mode(None)
        dist.destroy_process_group()
    machine.restart()
    kernel = kernel_of()
    call(kernel)
    assert kernel.best_config.kwargs == {"BLOCK": 32}


# --- Programs -------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner
{extra}
print(__name__, sys.argv[1:], Autotuner.run.__module__, __file__.endswith(sys.argv[0]))
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


def python(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(Path(autotune_fakes.__file__).parent)])
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_programs_are_run_as_python_runs_them(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("value = 3\n")
    (package / "program.py").write_text(SCRIPT.format(extra="from .helper import value"))
    (tmp_path / "helper.py").write_text("value = 4\n")
    (tmp_path / "script.py").write_text(SCRIPT.format(extra="from helper import value"))
    ours = ("-m", "costmodel.autotune")
    for program in (["script.py", "7"], ["-m", "package.program", "7"], ["script.py"]):
        plain = python(*program, cwd=tmp_path)
        done = python(*ours, *program, cwd=tmp_path)
        assert done.returncode == plain.returncode == (7 if "7" in program else 0), done.stderr
        assert done.stdout == plain.stdout.replace(
            "triton.runtime.autotuner", "costmodel.autotune.tuner"
        )
    done = python(*ours, cwd=tmp_path)
    assert done.returncode == 1
    assert "expected a script or -m MODULE" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["-h"], 0, "SCRIPT.py ... (or -m MODULE ...)"),
        (["--help"], 0, "SCRIPT.py ... (or -m MODULE ...)"),
        (["nope.py", "--option"], 1, "there is no file nope.py"),
        (["--option"], 1, "there is no file --option"),
        (["-m", "nope"], 1, "there is no module nope"),
        (["-m", "nope.mod", "-h"], 1, "there is no module nope.mod"),
        (["-m", "json.mod"], 1, "there is no module json.mod"),
    ],
)
def test_help_and_a_program_that_is_not_there_are_one_line(
    tmp_path: Path, options: list[str], code: int, told: str
) -> None:
    done = python("-m", "costmodel.autotune", *options, cwd=tmp_path)
    (line,) = (done.stderr if code else done.stdout).splitlines()
    assert (done.returncode, told in line) == (code, True)


def test_what_a_program_lacks_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import nope")
    (tmp_path / "script.py").write_text("import nope")
    for program in (["script.py"], ["-m", "package.program"]):
        done = python("-m", "costmodel.autotune", *program, cwd=tmp_path)
        assert "Traceback" in done.stderr
        assert "No module named 'nope'" in done.stderr


@pytest.mark.slow
def test_a_variable_is_enough(tmp_path: Path) -> None:
    text = "import triton, costmodel; print(triton.runtime.Autotuner.run.__module__)"
    for value, expected in (("1", "costmodel"), ("0", "triton"), ("", "triton")):
        done = python("-c", text, cwd=tmp_path, COSTMODEL_AUTOTUNE=value)
        assert done.stdout.startswith(expected), done.stderr


INTERPRETED = """
import torch, triton, costmodel
from autotune_fakes import add, configs
costmodel.replace_triton_autotune()
for tune in (costmodel.autotune, triton.autotune):
    kernel = tune(configs(64, 32), ["n"])(triton.jit(add))
    x = torch.arange(8.0)
    out = torch.zeros(8)
    kernel.configs = kernel.configs[:1]
    kernel[(1,)](x, x, out, 8)
    assert out.tolist() == (2 * x).tolist()
kernel = costmodel.autotune(configs(64, 32), ["n"], do_bench=lambda f, quantiles: [f() or 1.0] * 3)
kernel = kernel(triton.jit(add))
kernel[(1,)](x, None, out, 8)
assert out.tolist() == x.tolist()
"""


WITHOUT_GPU = """
import sys, torch, triton, costmodel
from autotune_fakes import add, configs
how, blocks = sys.argv[1], (64, 32, 128)[: int(sys.argv[2])]
if how == "replaced":
    costmodel.replace_triton_autotune()
tune = triton.autotune if how == "replaced" else costmodel.autotune
kernel = tune(configs(*blocks), ["n"])(triton.jit(add))
if how == "heuristics":
    kernel = triton.heuristics({})(kernel)
x = torch.zeros(8)
try:
    if how == "frozen":
        kernel.frozen(x, x, x, 8, grid=(1,))
    else:
        kernel[(1,)](x, x, x, 8)
except costmodel.NoGpu as error:
    assert "costmodel compile --bundle" in str(error), error
    assert "TRITON_INTERPRET=1" in str(error) and "kernel.fn" in str(error), error
    print("no GPU")
if how == "interpreted":
    kernel.fn[(1,)](x + 1, x + 1, x, 8, BLOCK=8)
    print(x.tolist())
"""


@pytest.mark.parametrize(
    ("how", "configs", "told"),
    [
        ("ours", 3, ["no GPU"]),
        ("ours", 1, ["no GPU"]),
        ("replaced", 3, ["no GPU"]),
        ("replaced", 1, ["no GPU"]),
        ("heuristics", 3, ["no GPU"]),
        ("frozen", 3, ["no GPU"]),
        ("interpreted", 3, ["no GPU", str([2.0] * 8)]),
        ("interpreted", 1, [str([2.0] * 8)]),
    ],
)
def test_a_call_without_a_gpu_says_what_works_without_one(
    tmp_path: Path, how: str, configs: int, told: list[str]
) -> None:
    (tmp_path / "program.py").write_text(WITHOUT_GPU)
    interpret = {"TRITON_INTERPRET": "1"} if how == "interpreted" else {}
    hidden = {"CUDA_VISIBLE_DEVICES": "", **interpret}
    done = python("program.py", how, str(configs), cwd=tmp_path, **hidden)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == told


def test_other_errors_stay_as_they_are(machine: Machine) -> None:
    for error in (RuntimeError("mine"), AttributeError("mine")):
        kernel = kernel_of(prune_configs_by={"early_config_prune": Mock(side_effect=error)})
        with pytest.raises(type(error), match=r"^mine$"):
            kernel[(1,)](torch.zeros(8), None, torch.zeros(8), 8)


def warned(kernel: Any, key: list[str], config: dict[str, Any], **options: Any) -> list[str]:
    """Return what is warned of where a kernel is decorated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = [triton.Config({"BLOCK": 64} | config), triton.Config({"BLOCK": 32} | config)]
        costmodel.autotune(both, key, **options)(kernel)
    assert {w.filename for w in caught} <= {__file__}, "it points at the decorator"
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("key", "config", "told"),
    [
        (["nn"], {}, ["'nn', as the key has (did you mean n?)"]),
        (["N"], {}, ["'N', as the key has (did you mean n?)"]),
        (["n", "zebra"], {}, ["'zebra', as the key has"]),
        (["n"], {"BLOK": 1}, ["'BLOK', as a Config has (did you mean BLOCK?)"]),
        (["n"], {"block": 1}, ["'block', as a Config has (did you mean BLOCK?)"]),
        (["n"], {"x_prt": 1}, ["'x_prt', as a Config has (did you mean x_ptr?)"]),
        (["n", "BLOCK"], {"num_stages": 4, "waves_per_eu": 2, "launch_pdl": True}, []),
        (["x_ptr"], {"n": 4}, []),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_names_that_are_no_argument_are_told_once_where_a_kernel_is_decorated(
    key: list[str], config: dict[str, Any], told: list[str], wrapped: bool
) -> None:
    def of_this_case(x_ptr, n, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr = 2):  # type: ignore
        tl.store(x_ptr, n)

    name = of_this_case.__name__ = f"case_{wrapped}_{'_'.join([*key, *config])}"
    kernel = triton.jit(of_this_case)
    if wrapped:
        kernel = triton.heuristics({"NUM_STAGES": lambda named: 3})(kernel)
    assert warned(kernel, key, config) == [f"{name} has no argument {text}" for text in told]
    assert warned(kernel, key, config) == [], "once in a process"


def test_a_wrapper_may_take_names_of_its_own() -> None:
    """Ours for scaled products does: no word of that where it is imported."""
    program = "import warnings; warnings.simplefilter('error'); import costmodel.scaled.launch"
    done = python("-c", program, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.fault("B52")
def test_the_interpreter_is_left_alone(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "1", "COSTMODEL_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "program.py").write_text(INTERPRETED)
    done = python("program.py", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "cache").exists()
