"""What a program sees of a first product: nothing on stdout, next to nothing on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

PROGRAM = """
import torch, costmodel
a, b = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((640, 2048), (2048, 1536)))
costmodel.matmul(a, b)
costmodel.matmul(a, b, mode="predict")
costmodel.warmup([(4096, 4096, 4096)])
"""


@pytest.mark.fault("B66")
def test_a_first_product_says_next_to_nothing(tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
        "COSTMODEL_CACHE_DIR": str(tmp_path / "winners"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }  # fmt: skip
    for _ in range(2):  # cold, and from the cache
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) <= 3, done.stderr


RUN = """
import json, torch
from costmodel.measure.card import current_run
run = current_run()
print(json.dumps([run.device_uuid, run.driver, torch.cuda.device_count()]))
"""


@pytest.mark.fault("B33")
def test_a_run_is_of_the_card_that_the_mask_shows() -> None:
    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    for index, uuid in enumerate(uuids):
        masked = "CUDA_VISIBLE_DEVICES" in os.environ  # then these are not the driver's indices
        for mask in (f"GPU-{uuid}", *([] if masked else [str(index)])):
            done = subprocess.run(
                [sys.executable, "-c", RUN], capture_output=True, text=True, check=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": mask,
                     "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            found, _, count = json.loads(done.stdout)
            assert (found, count) == (uuid, 1)


@pytest.mark.fault("B16")
def test_winners_are_of_the_installed_driver() -> None:
    from costmodel.hardware.installed import driver_version, triton_build

    assert driver_version()[:1].isdigit() or driver_version().startswith("CUDA ")
    assert triton_build()
