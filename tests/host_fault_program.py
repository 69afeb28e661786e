"""Multiplies on a CPU whose files, processes or C compiler fail; prints what came of it as JSON.

Timings are made up, and there is no device. Compiling, its processes, Triton's cache and the build
of its launcher are real.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from dispatch_fakes import Machine, operands
from stub_driver_program import pretend_a_device

import costmodel
from costmodel import nn
from costmodel.dispatch import dispatch, loading
from costmodel.gemm.specialize import compile_for_device
from costmodel.gemm.workload import Workload
from costmodel.launch.kernel import load
from costmodel.tuning.winners import Winners

SIZES = (64, 600, 620)  # predicted; tuned; of the same bucket


def main(cache: str, has_driver: bool) -> None:
    if has_driver:
        pretend_a_device()
    machine = Machine(pytest.MonkeyPatch(), Path(cache))
    patch = pytest.MonkeyPatch().setattr
    patch("costmodel.tuning.tuner.compile_for_device", compile_for_device)
    patch(loading, "load", load)
    dispatch.winners = Winners(
        dispatch.winners.cache, target_of=dispatch.winners.target_of,
        process_of=lambda _: machine.bench, compile_=compile_for_device,
    )  # fmt: skip
    torch.manual_seed(0)
    wrong, chosen = [], []
    layer = nn.Linear(128, 128, dtype=torch.float16)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for m in SIZES:
            a, b = operands(m, 128, 128)
            found = costmodel.matmul(a, b)
            wrong += [] if torch.allclose(found.float(), a.float() @ b.float(), atol=0.05) else [m]
            entry = dispatch.entry_for(a, b)
            chosen.append(str(entry and entry[0].config))
            x = operands(m, 8, 128)[0]
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
            wrong += [] if torch.allclose(layer(x), expected, atol=0.05) else [f"layer of {m}"]
        error = ""
        try:
            key = dispatch.winners.key(Workload.dense(1100, 128, 128), 0)
            dispatch.winners.tune(key, 1100)
        except costmodel.errors.HostError as refused:
            error = str(refused)
    told = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    print(json.dumps({"wrong": wrong, "chosen": chosen, "told": told, "error": error}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "driver")
