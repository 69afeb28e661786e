"""Short names of configurations and workloads: what the documentation says of each part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_cli import run

from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.workload import Workload

ROOT = Path(__file__).parents[1]
KERNELS = (ROOT / "docs" / "kernels.md").read_text()
LEGEND = KERNELS.split("## Names\n")[-1].split("\n## ")[0]


def test_the_example_of_a_configuration_has_every_part() -> None:
    (name,) = re.findall(r"written `(tma[^`]*)`", LEGEND)
    config = parse_config(name)
    assert str(config) == name
    plain = GemmConfig(config.kernel, 128, 256, 64, 8, 4)
    for part in ("kernel", "maxnreg", "halves", "flatten", "repack", "split_k"):
        assert part == "kernel" or getattr(config, part) != getattr(plain, part)
    table = " ".join(re.findall(r"^\| (`.*`) \|", LEGEND, re.MULTILINE))
    assert set(re.findall(r"`([^`]*)`", table)) >= set(name.split())


def test_the_example_of_a_workload_is_one() -> None:
    (key,) = re.findall(r"written `(\d[^`]*)`", LEGEND)
    assert key == Workload.dense(64, 4096, 14336).key()
    strided = Workload.dense(64, 4096, 14336, out_dtype="float32").key()
    assert "float16>float32" in strided
    assert "`float16>float32`" in LEGEND


@pytest.mark.parametrize("where", ["readme", "explain"])
def test_the_legend_is_found(where: str) -> None:
    if where == "readme":
        assert "(docs/kernels.md#names)" in (ROOT / "README.md").read_text()
    else:
        assert "docs/kernels.md" in run("explain", "--help").stdout
