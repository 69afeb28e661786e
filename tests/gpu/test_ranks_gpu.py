"""Two ranks on the GPUs there are: none times by itself, and both launch what one decided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
import glob, json, os, sys
import torch, torch.distributed as dist
import costmodel
from costmodel.dispatch import dispatch

rank, folder, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
index = rank % torch.cuda.device_count()
torch.cuda.set_device(index)
os.environ["COSTMODEL_CACHE_DIR"] = f"{folder}/cache-{rank}"
store = f"file://{folder}/store"
a, b = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((1024, 2048), (2048, 1024)))
exact = (a.double() @ b.double()).float()

def chosen():
    out = costmodel.matmul(a, b)
    error = ((out.float() - exact).abs().max() / exact.abs().max()).item()
    launch = dispatch.entry_for(a, b)[0]
    return {"config": str(launch.config), "timed": launch.result.timed, "error": error}

dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
found = {"predicted": chosen()}
(result,) = costmodel.warmup([(1024, 1024, 2048)], group=dist.group.WORLD)
found["agreed"] = str(result.chosen)
found["then"] = chosen()
cache = f"{folder}/cache-{rank}"
found["cache"] = len(glob.glob(f"{cache}/*.json"))
dist.barrier()
dist.destroy_process_group()
print(json.dumps(found))
"""


def run(folder: Path, backend: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder), backend], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=500) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(err for _, err in said)
    return [json.loads(out) for out, _ in said]


@pytest.mark.fault("B29")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_launch_the_same(tmp_path: Path, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    first, second = run(tmp_path, backend)
    assert first["predicted"]["config"] == second["predicted"]["config"]
    assert not first["predicted"]["timed"]
    assert not second["predicted"]["timed"]
    assert first["agreed"] == second["agreed"]
    assert first["then"]["config"] == second["then"]["config"]
    assert first["then"]["timed"]
    assert all(r[when]["error"] < 2e-3 for r in (first, second) for when in ("predicted", "then"))
    assert (first["cache"], second["cache"]) == (1, 0), "one has tuned"
