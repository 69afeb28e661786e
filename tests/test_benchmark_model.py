"""The benchmark of whole models: on a CPU, with torch's layers on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def pairs(script: Any) -> Any:
    return script("model_pairs")


@pytest.fixture
def bench(script: Any) -> Any:
    return script("bench_model")


@pytest.fixture
def gpu(pairs: Any) -> Any:
    class OnCpu(pairs.Gpu):
        """No memory is counted, and a graph is the call itself."""

        device = "cpu"

        def synchronize(self) -> None: ...

        def allocated(self) -> int:
            return 0

        def peak(self, call: Any) -> int:
            call()
            return 3 << 20

        def capture(self, call: Any) -> Any:
            call()
            return call

    return OnCpu()


def tiny_pair(pairs: Any) -> Any:
    sizes = pairs.Sizes(hidden=64, feed_forward=96, heads=4, kv_heads=2, layers=2)
    return pairs.Pair.of(pairs.Stack(sizes), replace=lambda model: 0)


def test_both_models_of_a_pair_have_the_same_weights(pairs: Any) -> None:
    pair = tiny_pair(pairs)
    theirs, ours = (list(model.parameters()) for model in (pair.theirs, pair.ours))
    assert all(a is b for a, b in zip(theirs, ours, strict=True))
    assert pair.theirs is not pair.ours
    assert pair.theirs[0].q is not pair.ours[0].q
    x = torch.randn(2, 3, 64)
    assert torch.equal(pair.theirs(x), pair.ours(x))


def test_the_layers_of_one_model_are_replaced(pairs: Any) -> None:
    from costmodel.nn import Linear

    pair = pairs.Pair.of(pairs.Stack(pairs.Sizes(64, 96, 4, 2, 2)))
    found = [sum(type(m) is Linear for m in model.modules()) for model in (pair.theirs, pair.ours)]
    assert found == [0, 2 * 7]
    assert pair.ours[0].q.weight is pair.theirs[0].q.weight


def test_a_stack_from_end_to_end(bench: Any, pairs: Any, gpu: Any) -> None:
    pair = tiny_pair(pairs)
    rows = [
        *bench.stack_rows(pair, [(1, 1), (2, 3)], gpu, 1),
        *bench.trained_rows(pair, [(2, 3)], gpu, 1),
    ]
    assert [(row["what"], row["workload"]) for row in rows] == [
        ("eager", "1x1"), ("graph", "1x1"), ("eager", "2x3"), ("graph", "2x3"), ("train", "2x3"),
    ]  # fmt: skip
    for row in rows:
        assert (row["group"], row["dtype"]) == ("stack", "float32")
        assert (row["triton_layers"], row["layers"]) == (0, 0)
        assert row["peak_torch_mib"] == row["peak_ours_mib"] == 3.0
        assert row["ratio"] == pytest.approx(row["torch_ms"] / row["ours_ms"], rel=0.02)
    assert all(p.grad is None for p in pair.theirs.parameters())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_from_end_to_end(
    bench: Any, gpu: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench.Pair, "of", lambda model: bench.Pair(model, model))
    monkeypatch.setattr(bench, "PROMPT", (2, 5))
    monkeypatch.setattr(bench, "PREFILL", (2, 8))
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    rows = list(bench.transformers_rows(family, gpu, 1, "float32", 3, **small))
    assert [row["what"] for row in rows] == ["generate", "prefill", "train"]


def test_rounds_take_turns_and_the_median_counts(
    pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, log = [0.0], []

    def side(name: str, seconds: float) -> Any:
        def call() -> None:
            log.append(name)
            # The third round meets a slow machine.
            clock[0] += seconds + (5.0 if 3 + 40 <= len(log) <= 3 + 60 else 0.0)

        return call

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    row = pairs.times_in_turn([side("torch", 0.02), side("ours", 0.01)], gpu, 5)
    assert row == {"torch_ms": 20.0, "ours_ms": 10.0, "ratio": 2.0}
    turns = log[3:]  # the first few say how long a call takes
    assert turns == (["torch"] * 10 + ["ours"] * 20 + ["torch"] * 20 + ["ours"] * 20
                     + ["torch"] * 20 + ["ours"] * 10)  # fmt: skip


def test_what_a_warm_up_leaves_is_not_in_the_peak_of_torch(
    pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [100 << 20]
    monkeypatch.setattr(gpu, "allocated", lambda: held[0])
    monkeypatch.setattr(gpu, "peak", lambda call: held[0])
    state = {"torch": 32 << 20, "ours": 5 << 20}

    def side(name: str) -> Any:
        def call() -> None:
            held[0] += state.pop(name, 0)

        return call

    sides = [side("torch"), side("ours")]
    assert pairs.warm_up(sides, gpu)["tuned"] == 0
    assert pairs.peaks_of(sides, gpu) == {"peak_torch_mib": 132.0, "peak_ours_mib": 137.0}


def test_the_worst_of_each_kind_is_told(bench: Any) -> None:
    stack = {"group": "stack", "peak_torch_mib": 100.0, "peak_ours_mib": 101.0, "tuning_s": 2.0}
    host = {"group": "host", "what": "forward"}
    rows = [
        stack | {"what": "eager", "workload": "1x1", "ratio": 1.01},
        stack | {"what": "generate", "workload": "4x128", "ratio": 0.97, "peak_ours_mib": 103.0},
        stack | {"what": "graph", "workload": "1x1", "ratio": 1.02},
        stack | {"what": "graph", "workload": "8x1", "ratio": 1.02},
        stack | {"what": "graph", "workload": "1x512", "ratio": 0.99},
        host | {"pinned": "triton", "host_ratio": 1.1},
        host | {"pinned": "torch", "host_ratio": 1.4},
    ]
    assert bench.summarize(rows) == {
        "graph_worst": 0.99, "graph_decode_geomean": 1.02, "eager_worst": 0.97,
        "training_worst": None, "compile_worst": None, "linear_grad_ratio": 1.1,
        "linear_grad_by_torch_ratio": 1.4, "peak_memory_worst": 1.03, "tuning_s": 10.0,
    }  # fmt: skip
    assert bench.summarize(rows[5:])["peak_memory_worst"] is None


def test_parts_and_shapes_are_thinned(
    bench: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Arguments:
        only, every, runs, compile_all = "stack", 2, 1, False

    monkeypatch.setattr(bench, "Sizes", lambda: None)
    monkeypatch.setattr(bench, "Stack", lambda sizes, dtype: dtype)
    monkeypatch.setattr(bench.Pair, "of", lambda model: model)
    for name in ("stack", "compiled", "trained"):
        monkeypatch.setattr(
            bench, f"{name}_rows", lambda pair, shapes, *rest, n=name: [(n, pair, shapes)]
        )
    assert list(bench.all_rows(Arguments, gpu)) == [
        ("stack", torch.bfloat16, bench.SHAPES[::2]),
        ("trained", torch.bfloat16, bench.TRAINED[::2]),
        ("compiled", torch.bfloat16, bench.FEWER[::2]),
        ("stack", torch.float16, bench.FEWER[::2]),
    ]
