"""``costmodel.matmul`` on a GPU: right in every call, tuned once, safe under threads and graphs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_interpreter import run_by_triton

import costmodel
from costmodel.dispatch import dispatch, launches
from costmodel.dispatch.launches import NewOutput
from costmodel.errors import CostModelError, GradientError, LayoutError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.launch.fast import TorchLaunch
from costmodel.launch.plan import Plan
from costmodel.models import RuleHeuristic
from costmodel.tuning.tuning_key import Buckets
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # These tests are about dispatch: whichever model is shipped may rank, or none.
    pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning"),
]

TIMED = (192, 1024, 2048)


@pytest.fixture(scope="module")
def shared_winners(tmp_path_factory: pytest.TempPathFactory) -> Winners:
    return Winners(WinnerCache(tmp_path_factory.mktemp("winners")))


@pytest.fixture
def winners(shared_winners: Winners, monkeypatch: pytest.MonkeyPatch) -> Iterator[Winners]:
    """Winners that this module's tests share, and no prepared launch."""
    monkeypatch.setattr(dispatch, "winners", shared_winners)
    dispatch.forget_launches()
    yield shared_winners
    dispatch.forget_launches()


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Winners]:
    """Winners of this test alone, none known."""
    fresh = Winners(WinnerCache(tmp_path))
    monkeypatch.setattr(dispatch, "winners", fresh)
    dispatch.forget_launches()
    yield fresh
    dispatch.forget_launches()


def operands(m, n, k, dtype=torch.float16, device="cuda"):
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    return a, b


def require_close(c, a, b, bias=None, activation="none"):
    ref = a.double() @ b.double() + (0 if bias is None else bias.double())
    ref = getattr(torch.nn.functional, activation, lambda x: x)(ref)
    tolerance = 2e-3 if c.dtype == torch.float16 else 1.6e-2
    bad = ~((c.double() - ref).abs() <= tolerance * (ref.abs() + a.shape[1] ** 0.5))
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} wrong"


@pytest.fixture
def switch():
    """Torch's own switch for TF32, put back afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


def worst_error(c, a, b):
    """In units of what a sum over k of products of unit variance grows to."""
    return float((c.double() - a.double() @ b.double()).abs().max()) / a.shape[1] ** 0.5


@pytest.mark.parametrize("mode", ["predict", "heuristic", "auto"])
def test_float32_is_ieee_or_tf32_as_asked(winners, switch, mode):
    for m, n, k in [(1, 64, 40), (33, 777, 555), (256, 640, 1024)]:
        a, b = operands(m, n, k, torch.float32)
        for b_ in (b, b.T.contiguous().T):
            for setting in ("ieee", "tf32"):
                switch.fp32_precision = setting
                for _ in range(2):
                    ieee = costmodel.matmul(a, b_, tf32=False, mode=mode)
                    coarse = costmodel.matmul(a, b_, tf32=True, mode=mode)
                    assert worst_error(ieee, a, b) < 2e-5
                    assert 2e-5 < worst_error(coarse, a, b) < 4e-3 or k == 40
                assert switch.fp32_precision == setting


def test_float32_follows_the_switch(winners, switch):
    a, b = operands(200, 320, 768, torch.float32)
    for _ in range(2):
        for setting, tf32 in (("ieee", False), ("tf32", True)):
            switch.fp32_precision = setting
            c = costmodel.matmul(a, b, mode="predict")
            assert torch.equal(c, costmodel.matmul(a, b, tf32=tf32, mode="predict"))
            assert (worst_error(c, a, b) > 2e-5) == tf32


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_float32_by_torch_is_as_asked(switch, tf32, activation):
    a, b = operands(100, 384, 512, torch.float32)
    bias = torch.randn(384, device="cuda")
    function = getattr(torch.nn.functional, activation or "", lambda x: x)
    for setting in ("ieee", "tf32"):
        switch.fp32_precision = setting
        for row in (None, bias):
            out = torch.full((100, 384), float("nan"), device="cuda")
            TorchLaunch(activation or "none", tf32=tf32)(a, b, out, row)
            ref = function(a.double() @ b.double() + (0 if row is None else row.double()))
            error = float((out.double() - ref).abs().max())
            assert error < (0.1 if tf32 else 1e-3)
            assert (error > 1e-3) == tf32
        assert switch.fp32_precision == setting


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_float32_results_of_16_bits(winners, dtype, activation):
    """By a kernel and by torch, with ``out`` and with ``out_dtype``: not rounded to 16 bits."""
    for m, n, k in ((100, 384, 256), (256, 1024, 1024)):
        a, b = operands(m, n, k, dtype)
        bias = torch.randn(n, device="cuda")
        function = getattr(torch.nn.functional, activation or "", lambda x: x)
        for row in (None, bias):
            ref = function(a.double() @ b.double() + (0 if row is None else row.double()))
            out, by_torch = (torch.full((m, n), float("nan"), device="cuda") for _ in range(2))
            TorchLaunch(activation or "none")(a, b, by_torch, row)
            for mode in ("predict", "heuristic"):
                options = {"bias": row, "activation": activation, "mode": mode}
                assert costmodel.matmul(a, b, out=out, **options) is out
                made = costmodel.matmul(a, b, out_dtype=torch.float32, **options)
                assert made.dtype == torch.float32
                for c in (out, made, by_torch):
                    torch.testing.assert_close(c.double(), ref, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["float32", "tf32", "float16"])
def test_float32_is_timed_beside_torch(cold, kind):
    """Every candidate and torch pass the gate of their kind."""
    workload = Workload.dense(
        256, 1024, 2048, **kind_options(kind), out_dtype="float32", bias=True, activation="relu"
    )
    result = costmodel.tune(workload, k=4)
    assert result.torch is not None
    assert result.torch.ok
    assert [m.error for _, m in result.measured if not m.ok] == []
    assert result.costs.timed >= 4


@pytest.mark.fault("B49")
def test_warmup_of_other_types_leaves_nothing_to_do(cold, switch, monkeypatch):
    switch.fp32_precision = "tf32"
    costmodel.warmup([(40, 384, 512)], dtype="float32", mode="predict")
    costmodel.warmup([(40, 384, 512)], out_dtype="float32", mode="predict")
    calls = []
    monkeypatch.setattr(dispatch, "resolve_launch", lambda *args: calls.append(args))
    a, b = operands(40, 384, 512, torch.float32)
    costmodel.matmul(a, b, mode="predict")
    costmodel.matmul(a.half(), b.half(), out_dtype=torch.float32, mode="predict")
    assert not calls


@pytest.mark.fault("B01", "B19")
@pytest.mark.parametrize("mode", ["predict", "heuristic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_right_in_every_layout_and_again(winners, mode, dtype):
    for m, n, k in [(1, 64, 40), (33, 777, 555), (256, 512, 1024), (466, 1000, 15)]:
        a, b = operands(m, n, k, dtype)
        for a_, b_ in ((a, b), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
            for _ in range(2):
                require_close(costmodel.matmul(a_, b_, mode=mode), a, b)


@pytest.mark.fault("B19")
def test_views_of_any_kind(winners):
    base = torch.randn(300, 400, device="cuda", dtype=torch.float16)
    a, b = base[:100:2, :90:3], base[10:40, 5:95:3]
    require_close(costmodel.matmul(a, b), a, b)
    shifted = base.flatten()[1 : 1 + 64 * 32].view(64, 32)  # aligned to 2 bytes
    require_close(costmodel.matmul(shifted, base[:32, :100]), shifted, base[:32, :100])


@pytest.mark.parametrize("mode", ["predict", "auto"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_epilogue(winners, mode, activation):
    a, b = operands(100, 384, 256)
    bias = torch.randn(384, device="cuda", dtype=torch.float16)
    c = costmodel.matmul(a, b, bias=bias, activation=activation, mode=mode)
    require_close(c, a, b, bias, activation or "none")


@pytest.mark.fault("B19")
def test_out_is_written_and_nothing_beside_it(winners):
    a, b = operands(466, 500, 256)
    buffer = torch.full((466, 520), 7.0, device="cuda", dtype=torch.float16)
    out = buffer[:, 8:508]
    for _ in range(2):
        assert costmodel.matmul(a, b, out=out) is out
        require_close(out, a, b)
    assert (buffer[:, :8] == 7).all()
    assert (buffer[:, 508:] == 7).all()
    with pytest.raises(LayoutError, match="shares memory with a"):
        costmodel.matmul(a, b[:, :256], out=a)


def test_sizes_of_zero(winners):
    a, b = operands(16, 32, 8)
    bias = torch.randn(32, device="cuda", dtype=torch.float16)
    assert costmodel.matmul(a[:0], b).shape == (0, 32)
    assert costmodel.matmul(a, b[:, :0]).shape == (16, 0)
    assert (costmodel.matmul(a[:, :0], b[:0]) == 0).all()
    wide = costmodel.matmul(a[:, :0], b[:0], bias=bias.float(), out_dtype=torch.float32)
    assert torch.equal(wide, bias.float().expand(16, 32))
    assert costmodel.matmul(a[:0].float(), b.float(), tf32=True).shape == (0, 32)
    c = costmodel.matmul(a[:, :0], b[:0], bias=bias, activation="relu")
    torch.testing.assert_close(c, bias.relu().expand(16, 32))


@pytest.mark.fault("B17")
def test_gradients_are_never_lost(winners):
    a, b = operands(32, 64, 48)
    costmodel.matmul(a, b)
    a.requires_grad_()
    assert costmodel.matmul(a, b).requires_grad
    with pytest.raises(GradientError, match="no_grad"):
        costmodel.matmul(a, b, out=torch.empty(32, 64, dtype=a.dtype, device="cuda"))
    with torch.no_grad():
        require_close(costmodel.matmul(a, b), a.detach(), b)


def test_tuned_once_kept_on_disk_and_read_back(cold, monkeypatch):
    a, b = operands(*TIMED)
    require_close(costmodel.matmul(a, b), a, b)
    first = costmodel.result_for(a, b)
    assert first is not None
    assert first.source.startswith("device")
    assert first.torch is not None
    assert first.torch.ok
    assert first.costs.timed >= 8
    (entry,) = cold.cache.entries()
    assert entry.result.to_dict() == first.to_dict()

    def no_tuning(*args: object, **kwargs: object) -> None:
        raise AssertionError("tuned again")

    monkeypatch.setattr("costmodel.tuning.winners.tune_by", no_tuning)
    monkeypatch.setattr(dispatch, "winners", Winners(WinnerCache(cold.cache.path)))
    dispatch.forget_launches()
    require_close(costmodel.matmul(a, b), a, b)
    again = costmodel.result_for(a, b)
    assert again is not None
    assert again.to_dict() == first.to_dict()


@pytest.mark.fault("B13")
@pytest.mark.parametrize("poison", ["truncated", "illegal", "not compilable"])
def test_a_poisoned_entry_is_replaced(cold, poison):
    m, n, k = 96, 640, 1024
    a, b = operands(m, n, k)
    costmodel.matmul(a, b, mode="predict")
    (entry,) = cold.cache.entries()
    data = json.loads(entry.path.read_text())
    if poison == "truncated":
        entry.path.write_text(entry.path.read_text()[:100])
    elif poison == "illegal":
        data["result"]["chosen"]["block_m"] = 7
        entry.path.write_text(json.dumps(data))
    else:
        bad = GemmConfig("pointer", 128, 128, 64, 4, 4, maxnreg=40)
        data["result"]["chosen"] = bad.to_dict()
        entry.path.write_text(json.dumps(data))
    cold.forget()
    dispatch.forget_launches()
    require_close(costmodel.matmul(a, b, mode="predict"), a, b)
    (again,) = cold.cache.entries()
    assert again.path == entry.path
    assert again.result.config == entry.result.config


def test_torch_as_winner_is_launched(cold):
    a, b = operands(64, 640, 1024)
    costmodel.matmul(a, b, mode="predict")
    (entry,) = cold.cache.entries()
    cold.cache.put(entry.key, replace(entry.result, config=None))
    cold.forget()
    dispatch.forget_launches()
    bias = torch.randn(640, device="cuda", dtype=torch.float16)
    require_close(costmodel.matmul(a, b, mode="predict"), a, b)
    found = costmodel.result_for(a, b, mode="predict")
    assert found is not None
    assert found.chosen == "torch"
    for activation in ("relu", "gelu", "silu"):
        out = torch.empty(64, 640, device="cuda", dtype=torch.float16)
        TorchLaunch(activation)(a, b, out, bias)
        require_close(out, a, b, bias, activation)


@pytest.mark.fault("B23")
def test_every_m_shares_the_winner_of_its_bucket(cold):
    b = torch.randn(256, 512, device="cuda", dtype=torch.float16)
    rows = [*range(1, 40), 100, 120, 300, 310, 500, 513, 700, 1999]
    for m in rows:
        a = torch.randn(m, 256, device="cuda", dtype=torch.float16)
        require_close(costmodel.matmul(a, b, mode="predict"), a, b)
    assert len(cold.cache.entries()) <= len({Buckets().of(m) for m in rows})


@pytest.mark.fault("B05")
@pytest.mark.parametrize("shape", [(64, 256, 16384), (512, 512, 512), (256, 4096, 1024)])
def test_warm_capture_replays_with_changed_inputs(winners, shape):
    a, b = operands(*shape)
    costmodel.matmul(a, b, mode="heuristic")
    found = costmodel.result_for(a, b, mode="heuristic")
    assert found is not None
    if shape[2] == 16384:
        assert isinstance(found.chosen, GemmConfig)
        assert found.chosen.split_k > 1
    graphs = []
    for _ in range(2):  # two graphs of one kind must not share the counters of split-K
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = costmodel.matmul(a, b, mode="heuristic")
            c2 = costmodel.matmul(a, b, mode="heuristic")
        graphs.append((graph, c, c2))
    streams = [torch.cuda.Stream() for _ in graphs]
    for turn in range(20):
        if turn % 5 == 0:
            torch.cuda.synchronize()
            a.normal_()
            torch.cuda.synchronize()
        for stream, (graph, _, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if turn % 5 == 4:
            torch.cuda.synchronize()
            for _, c, c2 in graphs:
                require_close(c, a, b)
                assert torch.equal(c, c2)


@pytest.mark.fault("B15")
def test_streams_do_not_share_their_scratch(winners):
    a, b = operands(64, 256, 16384)
    want = costmodel.matmul(a, b, mode="heuristic")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(costmodel.matmul(a, b, mode="heuristic"))
    torch.cuda.synchronize()
    assert all(torch.equal(want, c) for c in results)


@pytest.mark.fault("B15")
def test_threads_tune_each_question_once(cold, monkeypatch):
    from costmodel.tuning import winners as module

    tuned = []
    real = module.tune_by

    def counted(answering, workload, target, **options):
        tuned.append(workload)
        return real(answering, workload, target, **options)

    monkeypatch.setattr(module, "tune_by", counted)
    shapes = [(80, 640, 768), (96, 640, 768), (200, 320, 768), (16, 2048, 1024)]
    expected = {(Buckets().of(m), n, k) for m, n, k in shapes}
    pairs = [operands(*s) for s in shapes]
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        a, b = pairs[i % len(pairs)]
        try:
            barrier.wait()
            require_close(costmodel.matmul(a, b), a, b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "deadlock"
    assert not errors
    assert len(tuned) == len(expected)


@pytest.mark.fault("B49")
def test_warmup_leaves_nothing_to_do(cold, monkeypatch):
    (result,) = costmodel.warmup([(40, 384, 512)], mode="predict")
    assert result is not None
    calls = []
    monkeypatch.setattr(dispatch, "resolve_launch", lambda *args: calls.append(args))
    a, b = operands(40, 384, 512)
    require_close(costmodel.matmul(a, b, mode="predict"), a, b)
    assert not calls


def test_tune_takes_tensors_and_matmul_goes_by_it(cold):
    a, b = operands(128, 256, 640)
    result = costmodel.tune(a, b, k=3)
    assert result.workload == Workload.dense(128, 256, 640)
    assert result.costs.timed >= 3
    require_close(costmodel.matmul(a, b), a, b)


@pytest.mark.fault("B16")
def test_the_key_tells_devices_and_modes_apart(winners):
    target = Target.current()
    asked = winners.key(Workload.dense(8, 16, 32), 0, mode="predict")
    model = RuleHeuristic()
    key = asked.on_disk(target, model)
    other = replace(target, device=replace(target.device, product="NVIDIA Other"))
    assert key != asked.on_disk(other, model)
    assert key != replace(asked, mode="heuristic").on_disk(target, model)


@pytest.mark.fault("B52")
def test_the_interpreter_is_refused(cold, monkeypatch):
    a, b = operands(24, 48, 56)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CostModelError, match="TRITON_INTERPRET"):
        costmodel.matmul(a, b)
    assert not cold.cache.entries()


@pytest.mark.fault("B25")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device_than_the_current(cold):
    a, b = operands(64, 640, 1024, device="cuda:1")
    with torch.cuda.device(0):
        for _ in range(2):
            require_close(costmodel.matmul(a, b, mode="predict"), a, b)
        with pytest.raises(costmodel.DeviceError, match="cuda:0"):
            costmodel.matmul(a.to("cuda:0"), b)


@pytest.mark.fault("B47")
@pytest.mark.parametrize("size", [64, 512])
def test_a_warm_call_costs_the_host_little_more_than_plain_triton(winners, size):
    a, b = operands(size, size, size)
    out = costmodel.matmul(a, b, mode="heuristic")
    found = costmodel.result_for(a, b, mode="heuristic")
    assert found is not None
    assert isinstance(found.chosen, GemmConfig)
    plan = Plan(found.workload, found.chosen, Target.current().device.sm_count)
    arguments = plan.arguments(a, b, out)

    def host_us(call) -> float:
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append((time.perf_counter() - start) / 20 * 1e6)
        return sorted(times)[len(times) // 2]

    ours = host_us(lambda: costmodel.matmul(a, b, mode="heuristic"))
    plain = host_us(lambda: run_by_triton(plan, arguments))
    torch_us = host_us(lambda: torch.mm(a, b))
    print(f"{size}: matmul {ours:.1f} us, plain Triton {plain:.1f}, torch.mm {torch_us:.1f}")
    assert ours <= plain + 10


class Named(torch.Tensor):
    """A user's kind of tensor."""


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(("m", "n"), [(3, 5), (1, 1), (3, 0), (0, 5)])
def test_a_new_output_is_what_torch_would_make(m: int, n: int, dtype: torch.dtype | None) -> None:
    assert launches._empty_strided_cuda is not None, "this torch makes tensors in another way"
    a, b = operands(m, n, 2)
    out, theirs = NewOutput(a, b.shape[1], dtype)(a), a.new_empty((m, n), dtype=dtype)
    for x in (out, theirs):
        assert (x.shape, x.dtype, x.device) == ((m, n), dtype or torch.float16, a.device)
    assert out.stride() == theirs.stride()
    with torch.inference_mode():
        assert NewOutput(a, b.shape[1], dtype)(a).is_inference()
    assert type(NewOutput(a, b.shape[1], dtype)(a.as_subclass(Named))) is Named


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_new_output_is_where_the_operands_are() -> None:
    a, b = operands(3, 5, 2, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert NewOutput(a, b.shape[1], None)(a).device == a.device


@pytest.mark.fault("B15")
def test_a_fresh_thread_launches_by_tensor_maps(winners: Winners) -> None:
    """It has no CUDA context yet, and the addresses are new: a map is to be made there."""
    a, b = operands(256, 256, 256)
    outs = [torch.full((256, 256), torch.nan, device="cuda", dtype=a.dtype) for _ in range(3)]
    costmodel.pin(GemmConfig("tma", 64, 64, 64), a, b)
    errors: list[BaseException] = []

    def multiply(out: torch.Tensor) -> None:
        try:
            costmodel.matmul(a, b, out=out)
        except BaseException as error:
            errors.append(error)

    try:
        for out in outs:
            thread = threading.Thread(target=multiply, args=(out,))
            thread.start()
            thread.join()
        torch.cuda.synchronize()
        assert errors == []
        for out in outs:
            require_close(out, a, b)
    finally:
        costmodel.unpin(a, b)
