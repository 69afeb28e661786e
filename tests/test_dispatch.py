"""What ``matmul`` refuses, and how winners are found and shared; all of it without a GPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import H100, MODEL, on_the_cpu
from hypothesis import given
from hypothesis import strategies as st
from random_model import RandomModel

import costmodel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.dispatch import dispatch
from costmodel.dispatch.check import Call, check_matrices, require_apart, spans_of
from costmodel.dispatch.resolve_launch import Resolved
from costmodel.errors import (
    DeviceError,
    GradientError,
    InvalidInput,
    LayoutError,
    ShapeError,
    UnsupportedDtype,
)
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import constants, kernel_function, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch.plan import Plan, Workspace
from costmodel.measure.replay import ReplayRunner
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners


def half(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


A, B = half(4, 8), half(8, 16)

REFUSED = [
    ({"a": half(4)}, ShapeError, r"columns in a \(4\) as rows in b \(8\)"),
    ({"a": half(2, 4, 8)}, DeviceError, "a is on cpu"),
    ({"a": half(2, 4, 8), "b": half(2, 8, 16)}, DeviceError, "a is on cpu"),
    ({"a": half(2, 4, 8), "out": half(8, 16)}, ShapeError, r"expected \[2, 4, 16\]"),
    ({"b": half(7, 16)}, ShapeError, r"columns in a \(8\) as rows in b \(7\)"),
    ({"out": half(4, 15)}, ShapeError, r"out has shape \[4, 15\]: expected \[4, 16\]"),
    ({"bias": half(4)}, ShapeError, "bias"),
    ({"bias": half(1, 16)}, ShapeError, "bias"),
    ({"bias": half(32)[::2]}, LayoutError, "contiguous"),
    ({"a": half(4, 8, dtype=torch.bfloat16)}, UnsupportedDtype, "a is bfloat16, b is float16"),
    ({"out": half(4, 16, dtype=torch.bfloat16)}, UnsupportedDtype, "out is bfloat16, a is float16"),
    ({"out": half(4, 16, dtype=torch.float64)}, UnsupportedDtype, "out is float64"),
    ({"out": half(4, 16, dtype=torch.float32)}, DeviceError, "a is on cpu"),
    ({"out_dtype": torch.float32}, DeviceError, "a is on cpu"),
    ({"out_dtype": torch.bfloat16}, UnsupportedDtype, "out_dtype is bfloat16, a is float16"),
    ({"out_dtype": "float32"}, InvalidInput, "torch.dtype"),
    ({"out_dtype": torch.float32, "out": half(4, 16)}, UnsupportedDtype, "out is float16, out_dt"),
    ({"out_dtype": torch.float32, "bias": half(16)}, UnsupportedDtype, "bias is float16, the res"),
    ({"bias": half(16, dtype=torch.float32)}, UnsupportedDtype, "bias is float32, the result"),
    ({"tf32": True}, InvalidInput, "tf32=True with float16 operands"),
    ({"tf32": "yes"}, InvalidInput, "tf32='yes'"),
    ({"tf32": False}, DeviceError, "a is on cpu"),
    ({"a": half(4, 8, dtype=torch.float32)}, UnsupportedDtype, "a is float32, b is float16"),
    ({"a": A.float(), "b": B.float(), "out": half(4, 16)}, UnsupportedDtype, "out is float16"),
    ({"a": A.float(), "b": B.float(), "tf32": True}, DeviceError, "a is on cpu"),
    ({"activation": "tanh"}, InvalidInput, "relu"),
    ({"mode": "fastest"}, InvalidInput, "exhaustive"),
    ({"a": [[1.0]]}, InvalidInput, "list"),
    ({"a": None}, InvalidInput, "a is a NoneType: expected a torch.Tensor"),
    ({"b": A.to_sparse()}, LayoutError, "to_dense"),
    ({"a": half(4, 8).requires_grad_()}, DeviceError, "a is on cpu"),
    ({"a": half(4, 8).requires_grad_(), "out": half(4, 16)}, GradientError, "no_grad"),
    ({"bias": half(16).requires_grad_(), "out": half(4, 16)}, GradientError, "bias"),
    ({}, DeviceError, "a is on cpu"),
    ({"a": A.to("meta"), "b": B.to("meta")}, DeviceError, "a is on meta"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSED)
def test_refused_with_a_clear_error(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    arguments = {"a": A, "b": B, **change}
    a, b = arguments.pop("a"), arguments.pop("b")
    with pytest.raises(error, match=text):
        costmodel.matmul(a, b, **arguments)  # type: ignore[arg-type]


@pytest.mark.fault("B57")
@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "int8", "float64", "complex64", "bool"]
)
def test_dtypes_without_a_kernel_are_named_at_once(name: str) -> None:
    other = torch.empty(8, 16, dtype=getattr(torch, name))
    with pytest.raises(UnsupportedDtype, match=rf"b is {name}.*float16, bfloat16"):
        costmodel.matmul(A, other)


@pytest.mark.fault("B29")
@pytest.mark.parametrize(
    ("mode", "then"),
    [
        ("auto", "predict"),
        ("background", "predict"),
        ("never", "predict"),
        ("exhaustive", "exhaustive"),
        ("topk", "topk"),
    ],
)
def test_no_timing_decides_where_torch_is_to_be_deterministic(
    monkeypatch: pytest.MonkeyPatch, mode: str, then: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "_first_call", lambda _, call: asked.append(call.mode))
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled)
        try:
            costmodel.matmul(A, B, mode=mode)
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [mode, then]


@pytest.mark.fault("B17")
def test_gradients_may_be_switched_off() -> None:
    with torch.no_grad(), pytest.raises(DeviceError):  # the next thing that is wrong
        costmodel.matmul(half(4, 8).requires_grad_(), B)


def test_refusals_change_nothing() -> None:
    out = torch.full((4, 16), 7.0, dtype=torch.float16)
    with pytest.raises(DeviceError):
        check_matrices(Call(A, B, out))
    assert (out == 7).all()


def share_memory(out: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether an ``out`` beside this A is refused."""
    far = half(1, 1)
    try:
        require_apart(out, a, far, None, spans_of(out, a, far, None))
    except LayoutError:
        return True
    return False


def test_out_must_not_share_memory_with_what_is_read() -> None:
    buffer = half(16, 40)
    a, beside = buffer[:, :16], buffer[:, 16:40]
    for out, x in ((beside, a), (a, beside), (half(16, 16), a), (buffer[:8], buffer[8:])):
        assert not share_memory(out, x)
    for out in (a, buffer[:, 15:31], buffer.flatten()[8:264].view(16, 16), buffer[:, 6:16].T):
        assert share_memory(out, a)


@given(*[st.integers(0, 600)] * 4, st.booleans())
def test_no_overlap_is_missed(
    out_at: int, a_at: int, b_at: int, bias_at: int, has_bias: bool
) -> None:
    memory = torch.zeros(1000, dtype=torch.float16)

    def at(first: int, rows: int, cols: int) -> torch.Tensor:
        return memory[first : first + rows * cols].view(rows, cols)

    out, a, b = at(out_at, 10, 12), at(a_at, 10, 9), at(b_at, 9, 12)
    bias = at(bias_at, 1, 12)[0] if has_bias else None
    inputs = {"a": (a, a_at), "b": (b, b_at), "bias": (bias, bias_at)}
    sharing = [
        name
        for name, (x, x_at) in inputs.items()
        if x is not None and x_at < out_at + 120 and out_at < x_at + x.numel()
    ]
    spans = spans_of(out, a, b, bias)
    if not sharing:
        require_apart(out, a, b, bias, spans)
    else:
        with pytest.raises(LayoutError, match=f"out shares memory with {sharing[0]},"):
            require_apart(out, a, b, bias, spans)


class Bench:
    """Replays instead of timing; counts who comes."""

    def __init__(self, recording: Dataset) -> None:
        self.recording = recording
        self.uses = 0

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[ReplayRunner]:
        self.uses += 1
        yield ReplayRunner(self.recording)


SIZES = [(m, n, 1024) for m in (600, 900) for n in (1024, 2048)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    data = Dataset.create(tmp_path_factory.mktemp("recording"), H100, {"repeats": 5})
    run = RunInfo("run", "GPU-a", "570", "2.11", "2026-11-27T00:00:00+00:00")
    for size in SIZES:
        workload = Workload.dense(*size)
        configs = SearchSpace.of(workload, H100).configs[:12]
        records = [
            TuningRecord(workload, c, "", Measurement("ok", 50.0 + i))
            for i, c in enumerate(configs)
        ]
        data.append_measurements(records, run=run, torch={workload: Measurement("ok", 99.0)})
    return data


@pytest.fixture
def bench(recording: Dataset) -> Bench:
    return Bench(recording)


def winners_of(bench: Bench, directory: Path) -> Winners:
    return Winners(
        WinnerCache(directory),
        target_of=lambda _: H100,
        process_of=lambda _: bench,
        compile_=lambda specs, target: (),
    )


def find(winners: Winners, m: int, n: int, k: int, mode: str = "auto", **options: Any) -> Any:
    return winners.find(key_of(winners, m, n, k, mode=mode, **options), m)


def key_of(winners: Winners, m: int, n: int, k: int, index: int = 0, **options: Any) -> TuningKey:
    return winners.key(Workload.dense(m, n, k), index, **{"model": MODEL, **options})


@pytest.mark.fault("B31")
def test_a_winner_is_tuned_once_and_outlives_the_process(bench: Bench, tmp_path: Path) -> None:
    winners = winners_of(bench, tmp_path)
    found = find(winners, *SIZES[0])
    assert found.source == "replay of h100-sxm"
    assert find(winners, *SIZES[0]) is found
    assert bench.uses == 1
    again = find(winners_of(bench, tmp_path), *SIZES[0])
    assert again.to_dict() == found.to_dict()
    assert bench.uses == 1


def test_the_first_m_of_a_bucket_stands_for_the_others(bench: Bench, tmp_path: Path) -> None:
    winners = winners_of(bench, tmp_path)
    found = find(winners, 600, 1024, 1024)
    assert find(winners, 601, 1024, 1024) is found
    assert find(winners, 640, 1024, 1024) is found
    assert bench.uses == 1


@pytest.mark.fault("B13")
def test_an_illegal_winner_on_disk_is_tuned_again(bench: Bench, tmp_path: Path) -> None:
    winners = winners_of(bench, tmp_path)
    good = find(winners, *SIZES[0])
    (entry,) = winners.cache.entries()
    bad = GemmConfig("tma", 256, 256, 256, 8, 8)
    winners.cache.put(entry.key, replace(good, config=bad))
    fresh = winners_of(bench, tmp_path)
    assert find(fresh, *SIZES[0]).config == good.config
    assert bench.uses == 2
    (rewritten,) = fresh.cache.entries()
    assert rewritten.result.config == good.config


def test_what_was_not_reliably_chosen_is_not_kept(bench: Bench, tmp_path: Path) -> None:
    winners = winners_of(bench, tmp_path)
    result = winners.tune(key_of(winners, *SIZES[0]), SIZES[0][0], budget_s=1e-9)
    assert result.measured
    assert not winners.cache.entries()
    assert find(winners, *SIZES[0]) is result, "but used in this process"


CHANGES: list[Callable[[Target], Target]] = [
    lambda t: replace(t, device=replace(t.device, product="NVIDIA H200")),
    lambda t: replace(t, device=replace(t.device, arch=100)),
    lambda t: replace(t, device=replace(t.device, sm_count=114)),
    lambda t: replace(t, toolchain=Toolchain("3.7.0", t.toolchain.ptxas)),
    lambda t: replace(t, toolchain=Toolchain("3.6.0+vendor", t.toolchain.ptxas)),
    lambda t: replace(t, toolchain=Toolchain(t.toolchain.triton, "13.0")),
]


@pytest.mark.fault("B16", "B46")
@pytest.mark.parametrize("change", CHANGES)
def test_another_device_or_compiler_is_another_key(
    change: Callable[[Target], Target], bench: Bench, tmp_path: Path
) -> None:
    asked = key_of(winners_of(bench, tmp_path), *SIZES[0])
    key = asked.on_disk(H100, MODEL)
    json.dumps(key)
    assert asked.on_disk(H100, MODEL) == key
    assert asked.on_disk(change(H100), MODEL) != key


@pytest.mark.fault("B16")
def test_whatever_else_a_choice_rests_on_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, tmp_path: Path
) -> None:
    winners = winners_of(bench, tmp_path)
    ask, other_model = key_of(winners, *SIZES[0]), RandomModel(seed=1)
    key = ask.on_disk(H100, MODEL)

    def with_types(*types: str, **options: Any) -> TuningKey:
        return winners.key(Workload.dense(*SIZES[0], *types, **options), 0, model=MODEL)

    others = [
        replace(ask, mode="exhaustive"),
        replace(ask, k=9),
        replace(ask, include_torch=False),
        with_types(bias=True),
        with_types("bfloat16"),
        with_types("float32"),
        with_types("float32", tf32=True),
        with_types(out_dtype="float32"),
        with_types(b_layout="col"),
    ]
    assert (key["n"], key["k"], key["top_k"]) == (*SIZES[0][1:], 8)
    keys = [other.on_disk(H100, MODEL) for other in others]
    keys.append(ask.on_disk(H100, other_model))
    assert all(one != other for one, other in itertools.combinations([key, *keys], 2))
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert ask.on_disk(H100, MODEL) != key


@pytest.mark.parametrize("kernel", ["pointer", "tma", "tma_persistent"])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_plan_fills_every_argument_that_is_not_baked(
    kernel: str, split: int, dtype: torch.dtype
) -> None:
    if kernel == "tma_persistent" and split > 1:
        pytest.skip("not in the space")
    workload = Workload.dense(64, 128, 256, str(dtype).removeprefix("torch."))
    config = GemmConfig(kernel, 64, 64, 64, 4, 3, split_k=split)  # type: ignore[arg-type]
    a, b, out = (half(*shape, dtype=dtype) for shape in ((64, 256), (256, 128), (64, 128)))
    plan = Plan(workload, config, 132)
    values = plan.arguments(a, b, out, None, plan.scratch(Workspace(a.device)))
    baked = constants(specialize(workload, config))
    names = set(kernel_function(kernel).arg_names) - set(baked)
    assert {n for n in names if values.get(n) is None} == set()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Call, torch.Tensor]]]:
    """``matmul`` without a GPU: nothing is computed; what first calls asked for, in order."""
    asked: list[tuple[Call, torch.Tensor]] = []

    class NoLaunch:
        result = None

        def __call__(self, *operands: Any) -> None:
            pass

    def prepare(call: Call, out: torch.Tensor, *_: Any) -> Any:
        asked.append((call, out))
        return Resolved(NoLaunch())  # type: ignore[arg-type]

    monkeypatch.setattr(dispatch, "resolve_launch", prepare)
    on_the_cpu(monkeypatch)
    dispatch.forget_launches()
    before = torch.backends.cuda.matmul.fp32_precision
    yield asked
    torch.backends.cuda.matmul.fp32_precision = before
    dispatch.forget_launches()


def test_float32_follows_the_switch_of_torch_at_every_call(
    prepared: list[tuple[Call, torch.Tensor]],
) -> None:
    a, b = half(4, 8, dtype=torch.float32), half(8, 16, dtype=torch.float32)
    switch: Any = torch.backends.cuda.matmul
    for _ in range(2):  # the second time both are known
        for setting in ("ieee", "tf32"):
            switch.fp32_precision = setting
            costmodel.matmul(a, b)
    assert [call.tf32 for call, _ in prepared] == [False, True]
    for setting in ("ieee", "tf32"):
        switch.fp32_precision = setting
        for tf32 in (False, True):
            costmodel.matmul(a, b, tf32=tf32)
    assert len(prepared) == 2, "explicit or not, it is one kind of call"


def test_16_bits_do_not_look_at_the_switch(
    prepared: list[tuple[Call, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "torch_multiplies_in_tf32", lambda: pytest.fail("looked"))
    for _ in range(2):
        assert costmodel.matmul(A, B).dtype == torch.float16
    assert len(prepared) == 1
    with pytest.raises(InvalidInput, match="tf32=True with float16 operands"):
        costmodel.matmul(A, B, tf32=True)


def test_the_result_may_be_asked_for_in_float32(prepared: list[tuple[Call, torch.Tensor]]) -> None:
    for _ in range(2):
        for dtype in (torch.float16, torch.bfloat16):
            a, b = A.to(dtype), B.to(dtype)
            wide = costmodel.matmul(a, b, out_dtype=torch.float32)
            assert (wide.shape, wide.dtype) == ((4, 16), torch.float32)
            assert costmodel.matmul(a, b).dtype == dtype
            out = half(4, 16, dtype=torch.float32)
            assert costmodel.matmul(a, b, out=out, out_dtype=torch.float32) is out
            assert costmodel.matmul(a, b, out=out, bias=out[0].clone()) is out
    assert [out.dtype for _, out in prepared[:3]] == [
        torch.float32, torch.float16, torch.float32,
    ]  # fmt: skip
    assert len(prepared) == 8


@pytest.mark.fault("B49")
def test_a_workload_is_warmed_up_as_the_call_will_be(
    prepared: list[tuple[Call, torch.Tensor]],
) -> None:
    for workload, options in (
        (Workload.dense(4, 16, 8), {}),
        (Workload.dense(4, 16, 8, "float32", tf32=True), {"tf32": True}),
        (Workload.dense(4, 16, 8, out_dtype="float32"), {"out_dtype": torch.float32}),
    ):
        dtype = getattr(torch, workload.code.dtype)
        a, b = A.to(dtype), B.to(dtype)
        costmodel.warmup([workload])
        count = len(prepared)
        costmodel.matmul(a, b, mode="auto", **options)  # type: ignore[arg-type]
        assert len(prepared) == count


@pytest.mark.fault("B49")
@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_ahead_of_time_float32_follows_the_switch_too(
    prepared: list[tuple[Call, torch.Tensor]], setting: str
) -> None:
    torch.backends.cuda.matmul.fp32_precision = setting
    kind = "tf32" if setting == "tf32" else "float32"

    def kind_of(*problem: Any, **types: Any) -> str:
        found = costmodel.pin("torch", *problem, **types).workload.code
        assert costmodel.unpin(*problem, **types)
        assert found.out_dtype == types.get("out_dtype", found.dtype)
        return found.kind

    assert kind_of(4, 16, 8, dtype="float32") == kind
    assert kind_of(A.float(), B.float()) == kind
    assert kind_of(4, 16, 8, dtype="float32", tf32=False) == "float32"
    assert kind_of(4, 16, 8, dtype="float32", tf32=True) == "tf32"
    assert kind_of(4, 16, 8) == kind_of(A, B, out_dtype="float32") == "float16"


def test_a_known_call_refuses_an_out_that_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first call does: the addresses may be others each time."""
    memory = torch.zeros(4096, dtype=torch.float16)
    a, b, bias = half(4, 8), memory[1000 : 1000 + 8 * 16].view(8, 16), half(16)
    launched = []

    def launch(*operands: torch.Tensor) -> None:
        launched.append(operands)

    monkeypatch.setattr(dispatch, "resolve_launch", lambda *_: Resolved(launch))  # type: ignore[arg-type]
    monkeypatch.setattr("costmodel.dispatch.check._check_devices", lambda _: None)
    dispatch.forget_launches()
    try:
        first = costmodel.matmul(a, b, out=memory[:64].view(4, 16), bias=bias)
        assert first.data_ptr() == memory.data_ptr()
        # Multiples of 8 elements, which have the alignment of the first: the same kind of call.
        for start in range(0, 1300, 8):
            out = memory[start : start + 64].view(4, 16)
            if start + 64 <= 1000 or start >= 1000 + 8 * 16:
                assert costmodel.matmul(a, b, out=out, bias=bias) is out
            else:
                with pytest.raises(LayoutError, match="out shares memory with b"):
                    costmodel.matmul(a, b, out=out, bias=bias)
        kept = len(launched)
        assert len(dispatch.launches) == 1
        assert kept == 1 + sum(s + 64 <= 1000 or s >= 1128 for s in range(0, 1300, 8))
    finally:
        dispatch.forget_launches()
