"""Modes, captures, streams and pins on a GPU: what the fakes of tests/test_modes.py stand for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import costmodel
from costmodel.dispatch import dispatch, loading
from costmodel.errors import CompileError, IllegalConfig
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.tuning.tuning_result import PINNED
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning"),
]

SIZE = (192, 1024, 2048)


@pytest.fixture(autouse=True)
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Winners]:
    """Winners of this test alone, none known, and no binary counted as loaded."""
    fresh = Winners(WinnerCache(tmp_path))
    monkeypatch.setattr(dispatch, "winners", fresh)
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr("costmodel.validation._warned", set())
    dispatch.forget_launches()
    yield fresh
    dispatch.forget_launches()


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """What Triton compiles in this process: names of kernels, in order."""
    import triton

    done: list[str] = []

    def listen(*, metadata, cache_hit, **_):
        if not cache_hit:
            done.append(str(metadata.get("name")))

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    yield done
    triton.knobs.compilation.listener = before


def operands(m, n, k):
    torch.manual_seed(m)
    shapes = (m, k), (k, n)
    return tuple(torch.randn(s, device="cuda", dtype=torch.float16) for s in shapes)


def require_close(c, a, b):
    ref = a.double() @ b.double()
    assert ((c.double() - ref).abs() <= 2e-3 * (ref.abs() + a.shape[1] ** 0.5)).all()


# --- captures -----------------------------------------------------------------------------------


@pytest.mark.fault("B05")
@pytest.mark.parametrize("mode", ["auto", "topk", "background", "never"])
def test_a_cold_capture_is_torchs_and_the_next_call_tunes(cold, mode):
    a, b = operands(*SIZE)
    torch.mm(a, b)  # in a capture cuBLAS cannot be started, by torch itself no more than by us
    before = costmodel.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
            c = costmodel.matmul(a, b, mode=mode)
        d = costmodel.matmul(a, b, mode=mode, activation="relu")  # one warning is enough
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.loaded, done.compiled) == (0, 0, 0, 0)
    assert done.makeshifts == 2
    assert cold.cache.entries() == []
    for _ in range(3):
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        require_close(c, a, b)
        assert torch.equal(d, c.relu())
    if mode in ("auto", "topk"):
        require_close(costmodel.matmul(a, b, mode=mode), a, b)
        found = costmodel.result_for(a, b, mode=mode)
        assert found is not None
        assert found.timed


@pytest.mark.fault("B05")
@pytest.mark.parametrize("mode", ["auto", "heuristic"])
def test_a_capture_takes_the_winner_or_the_best_that_is_loaded(cold, mode):
    """Of another m, which was never called: in the same bucket, and in another."""
    m, n, k = 48, 640, 1024
    a, b = operands(m, n, k)
    costmodel.matmul(a, b, mode="heuristic")
    if mode == "auto":
        costmodel.matmul(a, b, mode=mode)
    for other, makeshifts in ((m + 3, 0), (700, 1)):
        x = torch.randn(other, k, device="cuda", dtype=torch.float16)
        before = costmodel.stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = costmodel.matmul(x, b, mode=mode)
        done = costmodel.stats().since(before)
        assert (done.loaded, done.compiled, done.makeshifts) == (0, 0, makeshifts)
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            require_close(c, x, b)


@pytest.mark.fault("B05")
def test_a_capture_survives_tuning_and_loading_in_the_background(cold):
    """torch captures in the mode in which any thread's unsafe call would spoil the graph."""
    a, b = operands(*SIZE)
    x, y = operands(256, 256, 256)
    torch.mm(x, y)
    before = costmodel.stats()
    costmodel.matmul(a, b, mode="background")
    captured = 0
    while costmodel.stats().since(before).background_done == 0:
        assert costmodel.stats().since(before).background_failed == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = torch.mm(x, y)
            time.sleep(0.3)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        require_close(z, x, y)
        captured += 1
    assert captured > 1
    require_close(costmodel.matmul(a, b, mode="background"), a, b)


# --- streams ------------------------------------------------------------------------------------


def test_tuning_leaves_streams_and_inputs_alone(cold):
    a, b = operands(*SIZE)
    fresh, weights = torch.randn_like(a), b.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    default, device = torch.cuda.current_stream(), torch.cuda.current_device()
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        a.copy_(fresh)  # is not done when the product is asked for
        c = costmodel.matmul(a, b)
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == default
    assert torch.cuda.current_device() == device
    found = costmodel.result_for(a, b)
    assert found is not None
    assert found.timed
    side.synchronize()
    require_close(c, fresh, b)
    assert torch.equal(a, fresh)
    assert torch.equal(b, weights)


@pytest.mark.fault("B49")
def test_the_background_does_not_wait_for_the_device(cold):
    Target.current()  # asks for ptxas's version
    a, b = operands(*SIZE)
    torch.mm(a, b)
    costmodel.matmul(*operands(32, 64, 64), mode="heuristic")  # whatever is imported late
    torch.cuda.synchronize()
    before = costmodel.stats()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    end = torch.cuda.Event()
    end.record()
    c = costmodel.matmul(a, b, mode="background")
    assert not end.query(), "the call waited for what was queued before it"
    at_once = costmodel.result_for(a, b, mode="background")
    assert at_once is None or not at_once.timed
    torch.cuda.synchronize()
    require_close(c, a, b)
    while costmodel.stats().since(before).background_done == 0:
        require_close(costmodel.matmul(a, b, mode="background"), a, b)
        time.sleep(0.01)
    require_close(costmodel.matmul(a, b, mode="background"), a, b)
    found = costmodel.result_for(a, b, mode="background")
    assert found is not None
    assert found.timed


@pytest.mark.fault("B15")
def test_threads_on_streams_of_their_own_ask_the_background(cold):
    pairs = [operands(160 + i % 2 * 64, 640, 1024) for i in range(4)]
    torch.cuda.synchronize()
    errors: list[BaseException] = []
    before = costmodel.stats()

    def work(i):
        a, b = pairs[i]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while costmodel.stats().since(before).background_done < 2:
                    require_close(costmodel.matmul(a, b, mode="background"), a, b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    assert errors == []
    assert costmodel.stats().since(before).tuned == 2


# --- the other m of a bucket --------------------------------------------------------------------


@pytest.mark.alone  # as many are timed as a second holds
def test_the_other_m_of_a_bucket_are_timed_once(cold):
    a, b = operands(640, 1280, 2048)
    costmodel.matmul(a[:530], b)
    before = costmodel.stats()
    require_close(costmodel.matmul(a[:611], b), a[:611], b)
    first = costmodel.stats().since(before)
    assert first.tuned == 0
    of_parts = 3 * 8  # m of each; for each up to five choices, torch among them
    assert of_parts <= first.timed <= 5 * of_parts
    (entry,) = cold.cache.entries()
    assert any(segment.latency_us is not None for segment in entry.result.plan.segments)
    assert entry.result.plan.segments[-1].last == 640
    before = costmodel.stats()
    for m in range(513, 641, 7):
        require_close(costmodel.matmul(a[:m], b), a[:m], b)
        found = costmodel.result_for(a[:m], b)
        assert found is not None
        assert found.config == entry.result.at(m).config
    assert costmodel.stats().since(before).timed == 0


# --- what is left after a warm-up ---------------------------------------------------------------


@pytest.mark.fault("B23", "B49")
@pytest.mark.parametrize("mode", ["auto", "predict", "background"])
def test_after_warmup_no_m_of_the_buckets_compiles_loads_or_tunes(cold, compiles, mode):
    problems = [(40, 384, 512), (200, 1024, 2048)]
    results = costmodel.warmup(problems, mode=mode)
    assert None not in results
    compiles.clear()
    before = costmodel.stats()
    for m, n, k in problems:
        first, last = cold.buckets.of(m)
        a, b = operands(last, n, k)
        for rows in range(first, last + 1):
            c = costmodel.matmul(a[:rows], b, mode=mode)
            if rows % 8 == 0:
                require_close(c, a[:rows], b)
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.compiled, done.loaded) == (0, 0, 0, 0)
    assert compiles == []


@pytest.mark.fault("B49")
def test_never_compiles_one_kernel(cold, compiles):
    a, b = operands(176, 1280, 2048)
    require_close(costmodel.matmul(a, b, mode="never"), a, b)
    assert len(compiles) <= 1
    done = costmodel.stats()
    for _ in range(3):
        require_close(costmodel.matmul(a, b, mode="never"), a, b)
    assert costmodel.stats() == done
    tuned = costmodel.tune(a, b)
    require_close(costmodel.matmul(a, b, mode="never"), a, b)
    found = costmodel.result_for(a, b, mode="never")
    assert found is not None
    assert found.config == tuned.config
    assert found.timed


@pytest.mark.alone  # timings that scatter are not kept
def test_topk_times_a_small_product(cold):
    a, b = operands(64, 256, 256)
    require_close(costmodel.matmul(a, b, mode="topk"), a, b)
    found = costmodel.result_for(a, b, mode="topk")
    assert found is not None
    assert found.costs.timed >= 8
    require_close(costmodel.matmul(a, b), a, b)
    assert [e.result.mode for e in cold.cache.entries()].count("topk") == 1


# --- pins ---------------------------------------------------------------------------------------


@pytest.mark.fault("B05")
def test_a_pinned_configuration_is_launched_also_inside_a_capture(cold):
    a, b = operands(*SIZE)
    workload = Workload.dense(*SIZE)
    for config in SearchSpace.of(workload, Target.current()).configs[::400]:
        try:
            costmodel.pin(config, *SIZE)
        except CompileError:
            continue
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                c = costmodel.matmul(a, b)
            found = costmodel.result_for(a, b)
            assert found is not None
            assert (found.config, found.source) == (config, PINNED)
            a.normal_()
            graph.replay()
            torch.cuda.synchronize()
            require_close(c, a, b)
            require_close(costmodel.matmul(a, b, mode="exhaustive"), a, b)
        finally:
            assert costmodel.unpin(a, b)
    with pytest.raises(IllegalConfig, match="shared memory"):
        costmodel.pin(GemmConfig("pointer", 256, 256, 256, 8, 8), *SIZE)
    assert cold.cache.entries() == []
