"""First calls on a GPU: what a later process need not do again, and what is built beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

PROGRAM = """
import json, sys, time
import torch, triton, costmodel

torch.manual_seed(0)
m, n, k, mode = *map(int, sys.argv[1:4]), sys.argv[4]
a = torch.randn(m, k, dtype=torch.float16, device="cuda")
b = torch.randn(k, n, dtype=torch.float16, device="cuda")
reference = torch.mm(a, b)
matmul = costmodel.matmul
torch.cuda.synchronize()
start = time.perf_counter()
c = matmul(a, b, mode=mode)
torch.cuda.synchronize()
took_s = time.perf_counter() - start
result = costmodel.result_for(a, b, mode=mode)
print(json.dumps({
    "took_s": took_s, "chosen": str(result.chosen), "source": result.source,
    "right": torch.allclose(c, reference, rtol=2e-3, atol=0.1),
    "xgboost": "xgboost" in sys.modules,
    "kernels": [n for n in sys.modules if n.startswith("costmodel.kernels.")],
}))
"""


def run(folder: Path, *arguments: object) -> dict[str, Any]:
    """What the program says in a fresh process that has these caches."""
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder / "triton"),
        "COSTMODEL_CACHE_DIR": str(folder / "costmodel"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], env=environment, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["right"], found
    return found


@pytest.mark.fault("B49")
@pytest.mark.parametrize("mode", ["auto", "predict"])
def test_a_later_process_neither_ranks_nor_reads_a_kernel(tmp_path: Path, mode: str) -> None:
    first = run(tmp_path, 2048, 2048, 2048, mode)
    time.sleep(0.2)
    run(tmp_path, 2048, 2048, 2048, mode)  # remembers what was too new to be remembered
    again = run(tmp_path, 2048, 2048, 2048, mode)
    assert again["chosen"] == first["chosen"]
    assert not again["xgboost"]
    if again["chosen"] != "torch":
        assert again["kernels"] == []
    assert again["took_s"] < 0.2 < first["took_s"]


@pytest.mark.fault("B13")
def test_a_cubin_that_was_changed_is_compiled_again(tmp_path: Path) -> None:
    first = run(tmp_path, 64, 4096, 4096, "predict")
    for path in (tmp_path / "triton").rglob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-64])
        path.with_suffix(".json").unlink()
    assert run(tmp_path, 64, 4096, 4096, "predict")["chosen"] == first["chosen"]


def test_launchers_are_there_before_a_binary_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import driver

    from costmodel.gemm.config import GemmConfig
    from costmodel.gemm.specialize import compile_for_device, specialize
    from costmodel.gemm.workload import Workload
    from costmodel.hardware.target import Target
    from costmodel.launch.kernel import load

    if not hasattr(driver, "make_launcher"):
        pytest.skip("this Triton has one launcher for all kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workload, target = Workload.dense(1024, 1024, 1024), Target.current()
    configs = [GemmConfig(kernel, 64, 64, 64) for kernel in ("pointer", "tma", "tma_persistent")]
    specs = [specialize(workload, config) for config in configs]
    assert all(artifact.ok for artifact in compile_for_device(specs, target))
    built = {*tmp_path.rglob("__triton_launcher*.so")}
    assert len(built) == 3
    for spec in specs:
        load(spec, target, torch.cuda.current_device(), remember=False)
    assert {*tmp_path.rglob("__triton_launcher*.so")} == built
