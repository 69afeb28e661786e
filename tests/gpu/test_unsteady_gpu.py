"""Tuning on a GPU that has rested, and beside a program that multiplies on it all the time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from costmodel.data.measurement import Candidate
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.measure.device import DeviceRunner
from costmodel.tuning.tuner import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
    pytest.mark.alone,
]

SHAPE = Workload.dense(77, 1408, 2048)
LOOP = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
out = torch.mm(a, a)
torch.cuda.synchronize()
print("runs", flush=True)
while True:
    for _ in range(20):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
"""


@pytest.fixture
def loop() -> Iterator[subprocess.Popen[str]]:
    """Another program that uses the GPU."""
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "runs\n"
        yield child
        child.kill()


@pytest.fixture
def runner() -> Iterator[DeviceRunner]:
    with DeviceRunner() as runner:
        yield runner


@pytest.mark.fault("N6")
def test_beside_another_program_a_choice_is_right_or_flagged(
    runner: DeviceRunner, loop: subprocess.Popen[str]
) -> None:
    found = [tune(SHAPE, runner=runner) for _ in range(3)]
    loop.kill()
    loop.wait()
    for each in found:
        print(each.chosen, each.reliable, each.why)
        if not each.reliable:
            assert "scatter too much to be sure" in each.why
        elif each.config is not None:
            chosen, by_torch = runner.compare(SHAPE, [each.config, None], rounds=27)
            assert chosen.latency_us <= 1.02 * by_torch.latency_us


@pytest.mark.fault("N6")
def test_alone_on_the_gpu_a_choice_is_reliable(runner: DeviceRunner) -> None:
    found = [tune(SHAPE, runner=runner) for _ in range(3)]
    for each in found:
        print(each.chosen, each.reliable, each.why)
    assert all(each.reliable for each in found)


@pytest.mark.fault("N11", "B43")
def test_the_first_timing_after_a_rest_is_as_the_next_ones(runner: DeviceRunner) -> None:
    candidate = Candidate(GemmConfig("tma", 64, 128, 64, 4, 4))
    for time_it in (
        lambda: runner.measure_torch(SHAPE),
        lambda: runner.measure(SHAPE, [candidate])[0],
        lambda: runner.compare(SHAPE, [None])[0],
    ):
        time_it()
        time.sleep(3.0)
        first, *later = (time_it().latency_us for _ in range(4))
        print(first, later)
        assert first <= 1.05 * max(later)
