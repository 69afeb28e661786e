"""Targets: by name without a driver, and a clear error where neither is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel.errors import InvalidInput, NoGpu, UnknownTarget
from costmodel.hardware.architectures import ARCHITECTURES, architecture
from costmodel.hardware.target import DEVICES, Target, Toolchain

TOOLS = Toolchain("3.6.0", "12.8")


@pytest.mark.parametrize("name", DEVICES)
def test_named_devices(name: str) -> None:
    target = Target.named(name, TOOLS)
    device = target.device
    assert device.name == name
    assert device.capability == f"sm_{device.arch}"
    assert 48 * 1024 < device.shared_bytes < device.sm_shared_bytes
    assert Target.from_dict(json.loads(json.dumps(target.to_dict()))) == target


def test_names_and_products_are_distinct() -> None:
    assert len({d.product for d in DEVICES.values()}) == len(DEVICES)


@pytest.mark.parametrize("name", ["", "h100", "H100-SXM", "../../etc", "x\x1b[31m"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownTarget, match="h100-sxm") as caught:
        Target.named(name, TOOLS)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "expected an object with 'device', found {}"),
        ({"device": {}}, "device: expected an object with 'name', found {}"),
        ({"device": None, "toolchain": None}, "device: expected `object`, got `null`, found None"),
        ({"device": "h100-sxm"}, "device: expected `object`, got `str`, found 'h100-sxm'"),
        (5, "expected `object`, got `int`, found 5"),
    ],
)
def test_foreign_targets_are_refused(data: Any, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Target.from_dict(data)
    assert str(caught.value) == f"not a target: {told}"


@pytest.mark.fault("B11")
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_driver_cannot_be_asked() -> None:
    with pytest.raises(NoGpu, match=r"torch\.cuda\.is_available"):
        Target.current()


def test_roofline_is_the_slower_of_arithmetic_and_traffic() -> None:
    device = DEVICES["h100-sxm"]
    assert device.roofline_us(989 * 10**6, 0) == pytest.approx(1.0)
    assert device.roofline_us(0, 3350 * 10**3) == pytest.approx(1.0)
    assert device.roofline_us(2 * 989 * 10**6, 3350 * 10**3) == pytest.approx(2.0)
    assert device.roofline_us(0, 0) > 0


def test_each_kind_of_operand_has_its_rate() -> None:
    """Of an H100 and an A100, by NVIDIA's data sheets."""
    h100, a100 = DEVICES["h100-sxm"], DEVICES["a100-sxm"]
    assert h100.tflops_of("float16") == h100.tflops_of("bfloat16") == 989
    assert h100.tflops_of("tf32") == pytest.approx(494.5)
    assert h100.tflops_of("float32") == pytest.approx(67, rel=0.01)
    assert a100.tflops_of("float32") == pytest.approx(19.5, rel=0.01)
    assert h100.roofline_us(67 * 10**6, 0, "float32") == pytest.approx(1.0, rel=0.01)
    assert h100.roofline_us(0, 3350 * 10**3, "float32") == pytest.approx(1.0)


def test_the_toolchain_is_the_installed_one() -> None:
    import triton

    tools = Toolchain.current()
    assert tools.triton == triton.__version__
    assert [int(part) for part in tools.ptxas.split(".")[:2]] >= [12, 0]
    assert Target.named("h100-sxm").toolchain == tools


def test_siblings_differ_in_clocks_and_memory_only() -> None:
    found = {
        (a, b) for a in DEVICES for b in DEVICES if a != b and DEVICES[a].is_sibling(DEVICES[b])
    }
    assert found == {("h100-sxm", "h200-sxm"), ("h200-sxm", "h100-sxm")}


def test_each_card_has_the_row_of_its_architecture() -> None:
    rows = {name: device.architecture for name, device in DEVICES.items()}
    assert {name: row.instruction for name, row in rows.items()} == {
        "a100-sxm": "mma.sync", "h100-sxm": "wgmma", "h100-pcie": "wgmma", "h200-sxm": "wgmma",
        "b200-sxm": "tcgen05",
    }  # fmt: skip
    assert {name for name, row in rows.items() if not row.tma} == {"a100-sxm"}


@pytest.mark.parametrize(("capability", "row"), [(87, 86), (90, 90), (103, 100), (121, 120)])
def test_an_architecture_without_a_row_is_as_the_one_before(capability: int, row: int) -> None:
    assert architecture(capability).capability == row


def test_an_architecture_before_all_rows_is_as_the_first() -> None:
    assert architecture(75).capability == min(ARCHITECTURES)


def test_the_driver_itself_is_asked_for_its_cuda(tmp_path: Path) -> None:
    """Torch 2.11 built for CUDA no longer tells it."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 13000; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from costmodel.hardware.installed import driver_cuda; print(driver_cuda())"
    command = [sys.executable, "-c", code]
    for folder, expected in ((tmp_path, "13000"), (tmp_path / "empty", "0")):
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{folder}"}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        if expected == "0" and torch.cuda.is_available():
            continue
        assert found.stdout.strip() == expected
