"""Calls of the public names with what they do not take, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import costmodel
from costmodel import Target, Workload

Call = Callable[[], Any]


def calls(target: Target) -> dict[str, Call]:
    """By name: what is called, and with what."""
    return {
        **_of_matmul(), **_of_ranking(target), **_of_problems(), **_of_files(target),
        **_of_settings(), **_of_types(), **_of_modules(),
    }  # fmt: skip


def _each(prefix: str, function: Callable[..., Any], options: list[dict[str, Any]],
          **base: Any) -> dict[str, Call]:  # fmt: skip
    def call(given: dict[str, Any]) -> Call:
        return lambda: function(**{**base, **given})

    return {f"{prefix} {_text(given)}": call(given) for given in options}


def _text(given: Any) -> str:
    if isinstance(given, dict):
        return ", ".join(f"{k}={_text(v)}" for k, v in given.items())
    if isinstance(given, torch.Tensor):
        kind = str(given.dtype).removeprefix("torch.")
        return f"<{kind} {list(given.shape)} {str(given.layout).removeprefix('torch.')}>"
    return repr(given)[:60] if type(given) is not object else "<object>"


def _of_matmul() -> dict[str, Call]:
    x = torch.zeros(4, 4, dtype=torch.float16)
    options: list[dict[str, Any]] = [
        {}, {"a": 5}, {"b": "x"}, {"a": None}, {"a": x.to_sparse()}, {"b": x.float()},
        {"a": x[:, :3]}, {"a": x.int()}, {"a": x.double()}, {"a": x.to(torch.complex64)},
        {"a": x[0]}, {"b": x[0]}, {"a": x[0, 0]}, {"a": x[None], "b": x[None].float()},
        {"a": x[None].expand(2, 4, 4), "b": x[None].expand(3, 4, 4)},
        {"mode": "fast"}, {"mode": []}, {"mode": 5}, {"mode": "never"}, {"mode": "predict"},
        {"model": 5}, {"model": []}, {"model": "/nowhere/at/all"}, {"bias": x}, {"bias": 5},
        {"bias": x[0, :3]}, {"bias": x[0].float()}, {"activation": "tanh"}, {"activation": 5},
        {"activation": "relu"}, {"tf32": True}, {"tf32": "yes"}, {"out_dtype": "float16"},
        {"out_dtype": torch.int8}, {"out_dtype": torch.bfloat16}, {"out": x}, {"out": x[:2]},
        {"out": 5}, {"out": x.float()}, {"out": torch.zeros(4, 1, dtype=x.dtype).expand(4, 4)},
        {"a": x.clone().requires_grad_(), "out": torch.zeros_like(x)},
        {"a": torch.zeros(0, 4, dtype=x.dtype)}, {"a": x.to("meta")}, {"b": x.to("meta")},
    ]  # fmt: skip
    return {
        **_each("matmul", costmodel.matmul, options, a=x, b=x),
        **_each("result_for", costmodel.result_for, options, a=x, b=x),
    }


def _of_ranking(target: Target) -> dict[str, Call]:
    sound = Workload.dense(1024, 4096, 1024)
    both: list[dict[str, Any]] = [
        {"workload": "1024x1024x1024"}, {"workload": None}, {"workload": (1, 2, 3)},
        {"target": "h100-sxm"}, {"target": 5}, {"target": None}, {"model": object()}, {"model": 5},
        {"model": "/nowhere/at/all"}, {"model": "a\0b"},
    ]  # fmt: skip
    rank = [
        {"k": "8"}, {"k": 1.5}, {"k": float("nan")}, {"k": True}, {"k": -1}, {"k": 0},
        {"configs": "tma"}, {"configs": [None]}, {"configs": 5}, {"configs": []},
    ]  # fmt: skip
    explain = [
        {"top": 0}, {"top": "3"}, {"top": True}, {"places": (0,)}, {"places": (10**6,)},
        {"places": "12"}, {"against": 5}, {"against": "tma"}, {"against": "tma 64x64x64 w4 s9 g8"},
    ]  # fmt: skip
    return {
        **_each("rank", costmodel.rank, [*both, *rank], workload=sound, target=target),
        **_each("explain", costmodel.explain, [*both, *explain], workload=sound, target=target),
    }


def _of_problems() -> dict[str, Call]:
    def tune(*, problem: Any = (64, 64, 64), **options: Any) -> Any:
        return costmodel.tune(*problem, **options)

    def pin(*, config: Any = "torch", problem: Any = (64, 64, 64), **options: Any) -> Any:
        return costmodel.pin(config, *problem, **options)

    def unpin(*, problem: Any = (64, 64, 64), **options: Any) -> Any:
        return costmodel.unpin(*problem, **options)

    types: list[dict[str, Any]] = [
        {}, {"dtype": "int8"}, {"dtype": "fp8"}, {"dtype": []}, {"dtype": torch.float16},
        {"out_dtype": "int8"}, {"dtype": "float16", "tf32": True},
    ]  # fmt: skip
    problems: list[dict[str, Any]] = [
        {"problem": x} for x in (
            (), (64,), (64, 64), (0, 64, 64), (64, -1, 64), (64, 64, "64"), (1.5, 2, 3),
            (True, 64, 64), ("64x64x64",), (None,), (64, 64, 64, 64),
        )
    ]  # fmt: skip
    tunings: list[dict[str, Any]] = [
        {"k": 0}, {"k": "8"}, {"k": 1.5}, {"k": "auto"}, {"budget_s": 0}, {"budget_s": "1"},
        {"budget_s": float("nan")}, {"budget_s": -1}, {"mode": "fast"}, {"mode": "never"},
        {"mode": "background"}, {"mode": []}, {"model": 5}, {"model": "/nowhere/at/all"},
        {"runner": "replay"},
    ]  # fmt: skip
    epilogues: list[dict[str, Any]] = [{"activation": "tanh"}, {"activation": 5}, {"bias": 5}]
    configs: list[dict[str, Any]] = [
        {"config": x} for x in (
            "tma 128x256", "", "Torch", b"tma", None, ("tma", 128), 5, "tma 64x32x128 w4 s6 g8",
            "tma 63x32x128 w4 s6 g8", "no_such 64x32x128 w4 s6 g8",
        )
    ]  # fmt: skip
    warmups: list[dict[str, Any]] = [
        {"problems": x} for x in (
            5, "64", None, [64, 64, 64], [(64, 64)], ["abc"], [None], [(64, 64, "64")],
            [(64, 64, -1)], [(64, 64, 64), (1.5, 2, 3)], [],
        )
    ]  # fmt: skip
    warm = [*types, *epilogues, *warmups, {"mode": "fast"}, {"mode": []}, {"model": 5},
            {"model": "/nowhere/at/all"}, {"group": 5}]  # fmt: skip
    return {
        **_each("tune", tune, [*types, *problems, *tunings]),
        **_each("pin", pin, [*types, *problems, *epilogues, *configs]),
        **_each("unpin", unpin, [*types, *problems, *epilogues]),
        **_each("warmup", costmodel.warmup, warm, problems=[(64, 64, 64)]),
    }


def _of_files(target: Target) -> dict[str, Call]:
    Path("file").write_text("{}")
    Path("folder").mkdir(exist_ok=True)
    Path("broken").mkdir(exist_ok=True)
    Path("broken/card.json").write_text('{"schema": ')
    Path("foreign").mkdir(exist_ok=True)
    Path("foreign/card.json").write_text('{"a": 1}')
    paths = (5, None, [], b"x", float("nan"), "a\0b", "x" * 5000, "", "nowhere", "file", "folder",
             "broken", "foreign")  # fmt: skip
    given = [{"path": path} for path in paths]
    sound = Workload.dense(64, 64, 64)
    functions: dict[str, Callable[[Any], Any]] = {
        "load": lambda path: costmodel.load(path),
        "train": lambda path: costmodel.train(path),
        "Dataset.open": lambda path: costmodel.Dataset.open(path),
        "use": lambda path: costmodel.use(path),
        "rank with the model": lambda path: costmodel.rank(sound, target, path, 1),
        "ReplayRunner": lambda path: costmodel.ReplayRunner(path),
    }
    return {
        key: call
        for name, function in functions.items()
        for key, call in _each(name, function, given).items()
    }


def _of_settings() -> dict[str, Call]:
    buckets = [
        {"steps": 0}, {"steps": 3}, {"steps": "4"}, {"steps": 256}, {"bounds": 5},
        {"bounds": (8, 4)}, {"bounds": (0, 4)}, {"bounds": ("a",)}, {"bounds": (4, 4)},
    ]  # fmt: skip
    return {
        **_each("set_mode", costmodel.set_mode,
                [{"mode": x} for x in ("fast", "", 5, [], "Auto", True)]),
        **_each("set_buckets", costmodel.set_buckets, buckets),
    }  # fmt: skip


def _of_types() -> dict[str, Call]:
    return {
        **_each("Workload.dense", Workload.dense, [
            {"m": -1}, {"m": "1"}, {"m": 1.0}, {"m": True}, {"dtype": []}, {"dtype": "int8"},
            {"out_dtype": "bfloat16"}, {"a_layout": "strided"}, {"a_layout": "x"}, {"tf32": True},
            {"activation": "tanh"}, {"bias": "yes"},
        ], m=1, n=1, k=1),
        **_each("Workload.from_dict", Workload.from_dict, [
            {"row": x} for x in (None, [], {}, {"m": 1}, {"m": 1, "n": 1, "k": 1, "a": 1},
                                 {"m": 1, "n": 1, "k": 1, "a_align": 3})
        ]),
        **_each("Target.named", Target.named, [{"name": x} for x in (None, [], "", "h100", "/")]),
        **_each("Target.from_dict", Target.from_dict, [{"data": x} for x in (None, {}, [], 5)]),
        **_each("Target.current", Target.current, [{}]),
        **_each("GemmConfig", costmodel.GemmConfig, [
            {"kernel": "x"}, {"block_m": 63}, {"block_m": 0}, {"block_k": "64"}, {"num_warps": 3},
            {"num_stages": 0}, {"maxnreg": -1}, {"halves": 1}, {"split_k": 10**6},
        ], kernel="tma", block_m=64, block_n=64, block_k=64),
    }  # fmt: skip


def _of_modules() -> dict[str, Call]:
    given = [{"module": 5}, {"module": None}, {"module": torch.zeros(2)}]
    return _each("nn.replace_linear", costmodel.nn.replace_linear, given)
