"""Triton's hooks around launches, on which profilers such as Proton rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.fast import TritonLaunch
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan
from costmodel.tuning.tuning_result import TuningResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.fault("N7"),
]

CONFIGS = {
    "pointer": GemmConfig("pointer", 64, 64, 64),
    "split": GemmConfig("pointer", 64, 64, 64, split_k=2),
    "tma": GemmConfig("tma", 64, 64, 64),
    "repack": GemmConfig("tma", 64, 64, 64, repack=True),
}
CONFIG = pytest.mark.parametrize("name", list(CONFIGS))


def launched(name: str) -> tuple[Any, str]:
    """Return a function that launches a configuration, and the name of its kernel."""
    k = 250 if name == "repack" else 256
    a, b = (torch.randn(s, device="cuda").half() for s in ((128, k), (k, 192)))
    out = torch.empty(128, 192, device="cuda", dtype=torch.float16)
    workload, target = Workload.from_tensors(a, b, out), Target.current()
    plan = Plan(workload, CONFIGS[name], target.device.sm_count)
    result = TuningResult.unranked(workload, target, "pinned", plan.config, "a test")
    kernel = load(plan.spec, target, 0)
    launch = TritonLaunch(plan, kernel, 0, result)

    def multiply() -> None:
        out.fill_(float("nan"))
        launch(a, b, out, None)
        torch.testing.assert_close(out, a @ b, atol=0.1, rtol=0.01)

    return multiply, kernel.binary.name


@pytest.fixture
def seen() -> Iterator[list[dict[str, Any]]]:
    """What the hook below was told; removed afterwards."""
    told: list[dict[str, Any]] = []
    yield told
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.calls.clear()


@CONFIG
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("chain_name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_each_launch_while_it_is_set(
    seen: list[dict[str, Any]], name: str, first: bool, chain_name: str
) -> None:
    def hook(metadata: Any) -> None:
        seen.append(dict(metadata.get()))

    chain = getattr(knobs.runtime, chain_name)
    multiply, kernel_name = launched(name)
    for is_set in (True, False, True) if first else (False, True, False):
        seen.clear()
        if is_set:
            chain.add(hook)
        else:
            chain.remove(hook)
        for _ in range(3):
            multiply()
        names = [told["name"] for told in seen]
        assert names.count(kernel_name) == 3 * is_set
        assert len(names) == 3 * is_set * (2 if name == "repack" else 1), "the copies are seen, too"


@CONFIG
def test_proton_counts_each_launch(tmp_path: Path, name: str) -> None:
    proton = pytest.importorskip("triton.profiler")
    multiply, kernel_name = launched(name)
    multiply()
    session = proton.start(str(tmp_path / "profile"), hook="triton")
    try:
        for _ in range(3):
            multiply()
        torch.cuda.synchronize()
    finally:
        proton.finalize(session)
    multiply()

    def count(node: dict[str, Any]) -> int:
        own = node.get("metrics", {}).get("count", 0) if named(node) == kernel_name else 0
        return int(own) + sum(count(child) for child in node.get("children", []))

    def named(node: dict[str, Any]) -> Any:
        return node.get("frame", {}).get("name")

    tree = json.loads((tmp_path / "profile.hatchet").read_text())
    assert sum(count(node) for node in tree if isinstance(node, dict)) == 3
