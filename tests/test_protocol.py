"""How many launches a replay has: from a few of what is long to a cap of what is short."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costmodel.gemm.dtypes import kinds
from costmodel.gemm.workload import Workload, kind_options
from costmodel.launch.problem import GemmProblem
from costmodel.measure.protocol import TimingProtocol

PROTOCOL = TimingProtocol()


@pytest.mark.fault("B61")
@given(st.floats(0.5, 1e5), st.floats(0.5, 1e5))
def test_what_takes_longer_is_launched_no_more_often(one_us: float, other_us: float) -> None:
    short, long = sorted((one_us, other_us))
    assert PROTOCOL.launches(short) >= PROTOCOL.launches(long)


@given(st.floats(0.5, 1e5))
def test_a_replay_is_about_as_long_as_asked_for(about_us: float) -> None:
    launches = PROTOCOL.launches(about_us)
    assert 1 <= launches <= PROTOCOL.max_launches
    if 10 < about_us < PROTOCOL.replay_us / 2:
        assert 0.7 < launches * about_us / PROTOCOL.replay_us < 1.5
    # One launch alone would bear all of what starting a replay costs.
    assert (launches == 1) == (about_us >= 4 * PROTOCOL.replay_us)


def test_one_launch_is_what_a_cap_of_one_gives() -> None:
    assert TimingProtocol(max_launches=1).launches(3.0) == 1


def passes(out: torch.Tensor, ref: torch.Tensor, workload: Workload) -> bool:
    """What the gate says, of all elements."""
    atol, rtol = PROTOCOL.tolerance(GemmProblem(workload).precision, workload.k)
    return bool(((out.double() - ref.double()).abs() <= atol + rtol * ref.double().abs()).all())


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 cut to the 10 bits of mantissa that tensor cores look at."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("k", [1, 16, 1000, 16384, 100_000])
def test_each_type_passes_its_own_gate_and_no_coarser_one_does(k: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(48, k), torch.randn(k, 40)
    float32, tf32, wide = (
        Workload.dense(48, 40, k, **options)
        for options in ({"dtype": "float32"}, {"dtype": "float32", "tf32": True},
                        {"out_dtype": "float32"})
    )  # fmt: skip
    exact, coarse = a.double() @ b.double(), as_tf32(a) @ as_tf32(b)
    assert passes(a @ b, exact, float32)
    assert passes(coarse, exact, tf32)
    assert not passes(coarse, exact, float32), "TF32 is not IEEE"
    assert not passes(a.bfloat16().float() @ b.bfloat16().float(), exact, tf32)
    half_a, half_b = a.half(), b.half()
    ref = half_a.double() @ half_b.double()
    assert passes(half_a.float() @ half_b.float(), ref, wide)
    assert not passes((half_a.float() @ half_b.float()).half(), ref, wide), "rounded in between"


@pytest.mark.fault("B09")
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("k", [64, 4096, 100_000])
def test_a_term_left_out_or_another_row_never_passes(kind: str, k: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(48, k), torch.randn(k, 40)
    workload = Workload.dense(48, 40, k, **kind_options(kind))
    ref = a @ b
    assert not passes(a.roll(1, 0) @ b, ref, workload)
    if kind in ("float32", "tf32") or k <= 4096:
        assert not passes(a[:, :-8] @ b[:-8], ref, workload)


def test_tolerances_are_json_and_part_of_the_protocol() -> None:
    data = PROTOCOL.to_dict()
    for name in ("atol", "rtol"):
        assert set(data[name]) == {*kinds(), "16-bit>float32"}
    assert set(data["growth"]) <= set(data["atol"])
